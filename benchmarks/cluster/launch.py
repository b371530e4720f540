# SPDX-License-Identifier: BSD-3-Clause
"""Runs a method on all hosts, each rank in a fresh process, and gathers what the ranks wrote."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster import hosts
from cluster.rank import Job

ATTEMPTS = 3
START_SECONDS = 120  # until the first step: importing torch takes its time on a busy machine

_BENCHMARKS = Path(__file__).resolve().parents[1]
_GRACE_SECONDS = 5  # for the other ranks once one has failed


@dataclass
class Run:
    """What the ranks measured; lists are by step, means over the ranks."""

    failures: list[str] = field(default_factory=list)  # why each failed attempt did
    milliseconds: list[float] = field(default_factory=list)  # without the warm-up
    losses: list[float] = field(default_factory=list)  # with it
    tx_bytes_per_step: float = 0
    gradient_bytes: int = 0
    peak_memory_bytes: int | None = None  # the largest of any rank
    device: str | None = None

    @property
    def succeeded(self) -> bool:
        return bool(self.milliseconds)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


def environment(rank: int, variables: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        **variables,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
        "NCCL_SOCKET_IFNAME": hosts.INTERFACE,
        "NCCL_IB_DISABLE": "1",
        "NCCL_HOSTID": str(rank),  # or NCCL refuses two ranks on a GPU
    }


def run(cluster: hosts.Hosts, variables: Mapping[str, str], step_limit: float, **job: Any) -> Run:
    """Trains on every host; again after a failure, which torch's own hook has now and then.

    Args:
        cluster: as many hosts as the job's world.
        variables: added to the ranks' environment.
        step_limit: seconds without a step on any rank after which an attempt has failed.
        job: the fields of a Job that are the same on all ranks.
    """
    result = Run()
    for _ in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix=f"{hosts.owner()}-") as folder:
            try:
                _attempt(cluster, variables, step_limit, job, Path(folder))
            except _Failed as failure:
                result.failures.append(str(failure))
                continue
            _gather(result, job, Path(folder))
            return result
    return result


class _Failed(Exception):
    pass


def _attempt(
    cluster: hosts.Hosts,
    variables: Mapping[str, str],
    step_limit: float,
    job: Mapping[str, Any],
    folder: Path,
) -> None:
    processes: list[subprocess.Popen[Any]] = []
    try:
        for rank in range(job["world"]):
            mine = Job(rank=rank, store=str(folder / "store"), timeout=START_SECONDS, **job)
            with (folder / f"log{rank}").open("w") as log:
                command = mine.command(folder / f"results{rank}")
                env = environment(rank, variables)
                processes.append(
                    cluster.start(
                        rank, command, env, stdout=log, stderr=subprocess.STDOUT, cwd=_BENCHMARKS
                    )
                )
        _wait(processes, step_limit, folder)
    finally:
        cluster.kill()


def _wait(processes: list[subprocess.Popen[Any]], step_limit: float, folder: Path) -> None:
    """Until all have ended.

    Raises:
        _Failed: if one fails, or none gets any further for too long.
    """
    written = 0
    deadline = time.monotonic() + START_SECONDS
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(codes):
            # Whose failure it was is known by what all of them say.
            time.sleep(_GRACE_SECONDS)
            raise _Failed(_complaints(folder, codes))
        size = sum(file.stat().st_size for file in folder.glob("results*"))
        if size > written:
            written = size
            deadline = time.monotonic() + step_limit
        if time.monotonic() > deadline:
            lines = [len(file.read_text().splitlines()) for file in folder.glob("results*")]
            raise _Failed(f"no rank got any further after steps {lines}")
        time.sleep(0.05)


def _complaints(folder: Path, codes: list[int | None]) -> str:
    """The last line of each failed rank's output, once each."""
    said = {}
    for rank, code in enumerate(codes):
        if code:
            lines = (folder / f"log{rank}").read_text(errors="replace").strip().splitlines()
            said[lines[-1] if lines else f"a rank ended with {code} and said nothing"] = rank
    return "; ".join(said)


def _gather(result: Run, job: Mapping[str, Any], folder: Path) -> None:
    ranks = []
    for rank in range(job["world"]):
        lines = (folder / f"results{rank}").read_text().splitlines()
        ranks.append([json.loads(line) for line in lines])
    steps = list(zip(*(records[:-1] for records in ranks), strict=True))
    counted = [records[-1] for records in ranks]
    milliseconds = [statistics.mean(record["ms"] for record in step) for step in steps]
    result.milliseconds = milliseconds[job["warmup"] :]
    result.losses = [statistics.mean(record["loss"] for record in step) for step in steps]
    result.tx_bytes_per_step = statistics.mean(c["tx_bytes"] for c in counted) / job["steps"]
    result.gradient_bytes = counted[0]["gradient_bytes"]
    result.device = counted[0]["device"]
    if result.device:
        result.peak_memory_bytes = max(c["peak_memory_bytes"] for c in counted)
