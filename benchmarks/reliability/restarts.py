# SPDX-License-Identifier: BSD-3-Clause
"""Kills a training job at random moments, and compares its end with an undisturbed run's.

Two processes train an attached DDP model over cpu:powersgd in int8. Each saves its own state every
few steps. At a random moment, one of them gets SIGKILL: while it starts, trains or writes a
checkpoint. The other is then ended, as launchers do, and the job starts again from the last step
that both have saved. It must end with the same bits as the undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from launcher.ranks import Rank, Ranks, call
from report import Record, Table, in_turn, provenance
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import torch_powersgd as tp
from reliability.training import digest

WORLD = 2
SAVE_EVERY = 10
LIMIT = 600.0  # seconds of a start
NOTICE = 0.1  # seconds until a launcher notices a death
# For each moment its share of the kills, and the seconds within which a kill then strikes.
MOMENTS = {"starting": (0.2, 3.0), "training": (0.5, 0.02), "saving": (0.3, 0.01)}


class Kill(NamedTuple):
    """A kill of a rank. `step` and `delay` are from 0 to 1, of the longest that are possible."""

    moment: str
    rank: int
    step: float
    delay: float


def plan(count: int, seed: int) -> list[Kill]:
    chance = random.Random(seed)
    moments = chance.choices([*MOMENTS], [share for share, _ in MOMENTS.values()], k=count)
    return [Kill(m, chance.randrange(WORLD), chance.random(), chance.random()) for m in moments]


def train(rank: Rank, folder: Path, steps: int, watched: bool = False) -> dict[str, str]:
    """Trains from the last checkpoint to the end. Returns digests of this rank's final values.

    If it is watched, it sends what it does, and in which step.
    """
    say = rank.pipe.send if watched else lambda words: None
    with rank.group("cpu:powersgd", LIMIT):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh(), nn.Linear(96, 1)]
        # Several buckets, so that a kill finds some in flight and others not yet ready.
        ddp = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)
        compression = tp.attach(ddp, tp.Options(matrix_approximation_rank=4))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        losses = torch.zeros(steps, dtype=torch.float64)
        if begin := last_saved(folder):
            state = torch.load(folder / f"{begin}.{rank.number}.pt")
            compression.load_state_dict(state["powersgd"])
            ddp.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            losses[:begin] = state["losses"]
        dist.barrier()  # or one rank removes a checkpoint before the other has looked for it
        for step in range(begin, steps):
            say(("training", step))
            generator = torch.Generator().manual_seed(1000 * step + rank.number)
            inputs = torch.randn(16, 64, generator=generator)
            target = (inputs.sum(1, keepdim=True) / 8).sin()
            loss = nn.functional.mse_loss(ddp(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[step] = loss.detach()
            if (done := step + 1) % SAVE_EVERY == 0:
                say(("saving", step))
                state = {
                    "model": ddp.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "powersgd": compression.state_dict(per_rank=True),
                    "losses": losses[:done].clone(),
                }
                save(state, folder / f"{done}.{rank.number}.pt")
                old = folder / f"{done - 2 * SAVE_EVERY}.{rank.number}.pt"
                old.unlink(missing_ok=True)
        leaves = tree_leaves(compression.state_dict(per_rank=True))
        return {
            "losses": digest([losses]),
            "parameters": digest(ddp.parameters()),
            "state": digest(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)),
        }


def save(state: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint under a temporary name, and renames it once it is on disk."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def last_saved(folder: Path) -> int:
    """The last step that all ranks have saved, or 0."""
    files = ([*folder.glob(f"*.{rank}.pt")] for rank in range(WORLD))
    steps = ({int(file.name.split(".")[0]) for file in of_rank} for of_rank in files)
    return max(set.intersection(*steps), default=0)


def strike(job: Ranks, kill: Kill, goal: int) -> str:
    """Kills a rank in the step `goal` or later, and ends the job. Returns its last moment."""
    pipe, victim = job.pipes[kill.rank], job.processes[kill.rank]
    moment, step = "starting", goal
    while moment != kill.moment or step < goal:
        moment, step = pipe.recv()
    time.sleep(kill.delay * MOMENTS[moment][1])
    victim.kill()
    with suppress(EOFError):
        while True:
            moment, _ = pipe.recv()
    time.sleep(NOTICE)
    for process in job.processes:
        process.kill()
    return moment


def run(folder: Path, steps: int, kills: list[Kill]) -> tuple[list[Any], dict[str, Any]]:
    """Runs a job in a new folder. Returns the ranks' final values, and the kills by moment."""
    folder.mkdir()
    found = {moment: {"kills": 0, "unfinished_files": 0} for moment in MOMENTS}
    # So many steps are left at each kill that the job cannot end before the last one.
    reach = steps // (len(kills) + 1)
    for kill in in_turn(kills, lambda kill: f"rank {kill.rank} is killed while {kill.moment}"):
        with Ranks(train, WORLD, folder, steps, True) as job:
            moment = strike(job, kill, last_saved(folder) + int(kill.step * reach))
        found[moment]["kills"] += 1
        for file in folder.glob("*.unfinished"):
            found[moment]["unfinished_files"] += f".{kill.rank}." in file.name
            file.unlink()
    return call(train, WORLD, folder, steps, what="the job", seconds=LIMIT), found


def measure(arguments: argparse.Namespace) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        undisturbed, _ = run(Path(folder, "undisturbed"), arguments.steps, [])
        kills = plan(arguments.kills, arguments.seed)
        killed, found = run(Path(folder, "killed"), arguments.steps, kills)
    about = {"seed": arguments.seed, "steps": arguments.steps, "kills": found}
    return {**provenance(), **about, "undisturbed": undisturbed, "killed": killed}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--kills", type=int, default=50, help="number of kills (50)")
    add("--steps", type=int, default=3000, help="number of steps of the job (3000)")
    add("--seed", type=int, default=1, help="seed of the moments and ranks (1)")


def tables_of(record: Record) -> dict[str, Table]:
    headings = ["the killed process was", "kills", "left an unfinished file"]
    rows = [[moment, *map(str, of.values())] for moment, of in record["kills"].items()]
    return {f"kills, seed {record['seed']}": (headings, rows)}


def problems(record: Record) -> list[str]:
    same = record["killed"] == record["undisturbed"]
    return [] if same else ["the killed job ended with other bits than the undisturbed one"]
