# SPDX-License-Identifier: BSD-3-Clause
"""Kills a training job's processes at random, and compares the result with an undisturbed run's.

After each kill, torchrun restarts the job of two processes. The job trains an attached DDP model
over cpu:powersgd in int8. Each process saves its own state every few steps, and resumes from the
last step that both have saved. Some kills strike while a checkpoint is written. The job must end
with the same bits as the undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import Record, Table, processor, provenance

from reliability import tables

WORLD = 2
SAVE_EVERY = 10
LIMIT = 1200.0  # seconds for the job, and for each kill
KILL_LIMIT = 60.0
# What the process does when it is killed, and how often.
MOMENTS = {"start": 0.2, "training": 0.5, "writing": 0.3}
COMPARED = ("loss", "losses", "parameters", "state")
_BENCHMARKS = Path(__file__).parents[1]


def plan(kills: int, seed: int) -> list[dict[str, Any]]:
    """The kills, in random order: moment, rank and two numbers from 0 to 1.

    Each moment gets its share of the kills.
    """
    chance = random.Random(seed)
    counts = {moment: round(share * kills) for moment, share in MOMENTS.items()}
    counts["training"] += kills - sum(counts.values())
    moments = [moment for moment, count in counts.items() for _ in range(count)]
    chance.shuffle(moments)
    return [
        {
            "moment": moment,
            "rank": chance.randrange(WORLD),
            "where": chance.random(),
            "when": chance.random(),
        }
        for moment in moments
    ]


def run(folder: Path, steps: int, orders: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Runs the job in an empty folder. Returns the result of each rank, and the kills."""
    folder.mkdir()
    job = {"steps": steps, "save_every": SAVE_EVERY, "kills": orders}
    (folder / "plan").write_text(json.dumps(job))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    launcher += [f"--max-restarts={2 * len(orders) + 2}", "--monitor-interval=0.1", "--module"]
    own = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / "log").open("wb") as log:
        agent = subprocess.Popen(
            [sys.executable, *launcher, "reliability.fate", str(folder)],
            cwd=_BENCHMARKS,
            env={**os.environ, **own},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = agent.wait(LIMIT + KILL_LIMIT * len(orders))
        finally:
            if agent.poll() is None:
                agent.terminate()  # torchrun ends its processes
                with contextlib.suppress(subprocess.TimeoutExpired):
                    agent.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
    kills = [json.loads(file.read_text()) for file in sorted(folder.glob("kill.*"))]
    if code or len(kills) < len(orders):
        end = (folder / "log").read_text()[-3000:]
        raise RuntimeError(f"the job ended with {code} after {len(kills)} kills\n{end}")
    ranks = [json.loads((folder / f"result.{rank}").read_text()) for rank in range(WORLD)]
    return {"ranks": ranks, "kills": kills, "other_failures": ranks[0]["restarts"] - len(kills)}


def summary(kills: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The kills by what the process was doing: how many, of which ranks, and what they left."""
    found: dict[str, dict[str, Any]] = {}
    for kill in kills:
        of_word = {"ranks": [0] * WORLD, "unfinished_files": 0, "newest_differ": 0}
        counts = found.setdefault(kill["found"], of_word)
        counts["ranks"][kill["rank"]] += 1
        counts["unfinished_files"] += kill["unfinished"]
        counts["newest_differ"] += len(set(kill["newest"])) > 1
    return found


def measure(arguments: argparse.Namespace) -> Record:
    record: Record = {
        **provenance(processor()),
        "seed": arguments.seed,
        "steps": arguments.steps,
        "save_every": SAVE_EVERY,
    }
    orders = plan(arguments.kills, arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        for name, todo in (("quiet", []), ("killed", orders)):
            ended = run(Path(folder, name), arguments.steps, todo)
            record[name] = {**ended, "kills": summary(ended["kills"])}
    return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kills", type=int, default=50, help="number of kills (50)")
    add("--steps", type=int, default=3000, help="number of steps of the job (3000)")
    add("--seed", type=int, default=0, help="seed of the moments and ranks (0)")


def tables_of(record: Record) -> dict[str, Table]:
    return {
        f"kills, seed {record['seed']}": tables.restart_kills(record),
        "ends": tables.restart_ends(record),
    }


def problems(record: Record) -> list[str]:
    """The results in which the killed job differs from the undisturbed run."""
    both = zip(record["quiet"]["ranks"], record["killed"]["ranks"], strict=True)
    return [
        f"the killed job ended with other bits: {name} of rank {rank}"
        for rank, (quiet, killed) in enumerate(both)
        for name in COMPARED
        if quiet[name] != killed[name]
    ]
