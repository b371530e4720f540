# SPDX-License-Identifier: BSD-3-Clause
"""Counts how many jobs get through their first steps on a slow network, and with which results.

    python benchmarks/bench_starts.py --starts 200 --ranks 2 4
    python benchmarks/bench_starts.py --starts 1000 --ranks 2 --steps 6 --late-ms 300 --jitter-ms 1

It starts the same training many times. The hosts are network namespaces on shaped links, so that
it needs root, ip and tc. The buckets are many and small, so that several are on their way at once.
A start has finished if all ranks end in time with equal parameters. If the collectives of a program
come in a fixed order, all starts end with the same bits. Where timing decides, ranks hang or abort.
Each rank may start late, and each frame take longer, by random times from the seed of the start.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bits import digest
from cluster import hosts, signals
from cluster.emulated_links import Link
from cluster.namespace import enter
from provenance import heading, processor, provenance
from text_tables import print_tables
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp

LAYERS, WIDTH = 8, 512
EXACT_STEPS = 2
FIELDS: dict[str, Any] = {
    "matrix_approximation_rank": 4,
    "start_powerSGD_iter": EXACT_STEPS,
}


def _attached(ddp: DistributedDataParallel, **fields: Any) -> None:
    tp.attach(ddp, tp.Options.hook_defaults(**FIELDS, **fields))


def _hooked(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(None, **FIELDS)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


METHODS: dict[str, tuple[str, str, Callable[[DistributedDataParallel], None]]] = {
    "attached": ("ours, attached", "cpu:powersgd", _attached),
    "bf16-wire": (
        "ours, bf16 wire",
        "cpu:powersgd",
        lambda ddp: _attached(ddp, wire_dtype=torch.bfloat16),
    ),
    "hook": ("torch's PowerSGD hook", "gloo", _hooked),
}


def _rank(
    namespace: str,
    method: str,
    rank: int,
    world: int,
    steps: int,
    limit: float,
    late: float,
    folder: str,
) -> None:
    """Runs one rank of a start. It writes a hash of its last parameters."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
    with open(os.path.join(folder, f"log{rank}"), "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    enter(namespace)
    time.sleep(late)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, backend, average = METHODS[method]
    # Not `default_group`: an abort that the hook's users meet counts here.
    dist.init_process_group(
        backend,
        store=dist.FileStore(os.path.join(folder, "store"), world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit),
    )
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)
    average(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    found = digest(ddp.parameters())
    dist.barrier()
    Path(folder, f"hash{rank}").write_text(found)
    dist.destroy_process_group()


def _start(
    cluster: hosts.Hosts, method: str, steps: int, limit: float, late: list[float]
) -> tuple[str, str]:
    """Runs one start. Returns how it ended, and the hash of the last parameters of all ranks.

    A start that takes longer than ``limit`` seconds hangs. The ranks are late by ``late`` seconds.
    """
    folder = tempfile.mkdtemp(prefix=f"{hosts.owner()}-")
    context = multiprocessing.get_context("forkserver")
    world = len(cluster)
    ranks = [
        context.Process(
            target=_rank, args=(name, method, rank, world, steps, limit, late[rank], folder)
        )
        for rank, name in enumerate(cluster.names)
    ]
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + limit
        # After a failure the other ranks would wait in vain.
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < deadline:
            if any(rank.exitcode for rank in ranks):
                break
            time.sleep(0.01)
        codes = [rank.exitcode for rank in ranks]
        if any(codes):
            return "a rank failed", ""
        if None in codes:
            return "hung", ""
        hashes = {Path(folder, f"hash{rank}").read_text() for rank in range(world)}
        return ("finished", hashes.pop()) if len(hashes) == 1 else ("ranks differ", "")
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()
        shutil.rmtree(folder, ignore_errors=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from rich.progress import track

    os.environ.update(
        {hosts.MARK: hosts.owner(), "GLOO_SOCKET_IFNAME": hosts.INTERFACE, "OMP_NUM_THREADS": "1"}
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch_powersgd", "bench_starts"])
    record: dict[str, Any] = {
        **provenance(processor()),
        "rate": arguments.rate,
        "steps": arguments.steps,
        "starts": arguments.starts,
        "late_ms": arguments.late_ms,
        "jitter_ms": arguments.jitter_ms,
        "results": [],
    }
    for world in arguments.ranks:
        for method in arguments.methods:
            endings: Counter[str] = Counter()
            hashes = set()
            link = Link(jitter=arguments.jitter_ms / 1e3)
            with hosts.Hosts(world, arguments.rate, link=link) as cluster:
                title = f"{METHODS[method][0]}, {world} ranks"
                for seed in track(range(arguments.starts), title):
                    drawn = random.Random(seed)
                    late = [drawn.uniform(0, arguments.late_ms / 1e3) for _ in range(world)]
                    ending, found = _start(cluster, method, arguments.steps, arguments.limit, late)
                    endings[ending] += 1
                    hashes |= {found} - {""}
            record["results"].append(
                {
                    "method": METHODS[method][0],
                    "ranks": world,
                    "endings": dict(endings),
                    "results": len(hashes),
                }
            )
            if arguments.json:
                arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return record


def show(record: dict[str, Any]) -> None:
    steps, rate = record["steps"], record["rate"]
    title = f"{record['starts']} starts of {steps} steps at {rate}"
    if late := record.get("late_ms"):
        title += f", ranks up to {late:g} ms late, frames up to {record['jitter_ms']:g} ms"
    headings = ["", "ranks", "finished", "failed", "hung", "ranks differ", "different results"]
    rows = []
    for result in record["results"]:
        ends = ("finished", "a rank failed", "hung", "ranks differ")
        counts = (str(result["endings"].get(end, 0)) for end in ends)
        rows.append([result["method"], str(result["ranks"]), *counts, str(result["results"])])
    print_tables(heading(record), {title: (headings, rows)})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--starts", type=int, default=200, help="number of starts of each method (200)")
    add("--steps", type=int, default=12, help="number of steps of a start (12)")
    add("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (2 4)")
    add("--rate", default="1gbit", help="rate of each link, as tc has it (1gbit)")
    add("--late-ms", type=float, default=0, help="most milliseconds that a rank starts late (0)")
    add("--jitter-ms", type=float, default=0, help="most milliseconds that a frame is late (0)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods (all)")
    add("--limit", type=float, default=60, help="seconds after which a start hangs (60)")
    add("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if lacks := hosts.missing():
        sys.exit(f"bench_starts cannot run here; missing: {', '.join(lacks)}")
    signals.unwind_on_signals()
    try:
        hosts.sweep()
        show(measure(arguments))
    except hosts.ClusterError as error:
        sys.exit(f"bench_starts: {error}")


if __name__ == "__main__":
    main()
