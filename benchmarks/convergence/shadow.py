# SPDX-License-Identifier: BSD-3-Clause
"""Compares the errors of shadow mode with the losses of compressed training.

It trains the three models exactly. After the same number of exact steps as in the part `losses`,
shadow mode compresses alongside the training, with float32 factors of each matrix rank. The losses
are those that `losses` has recorded after 300 steps. Spearman's correlation compares the order of
the errors with the order of the losses, over all matrix ranks and tasks.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from cluster.methods import Contender
from cluster.rank import group
from cluster.trainees import EXACT_STEPS
from launcher import ranks
from report import Record, Table, in_turn, provenance
from scipy.stats import spearmanr

import torch_powersgd as tp
from convergence import tables
from convergence.losses import LIMIT_SECONDS
from convergence.tasks import MODELS, Task
from torch_powersgd.shadow_mode import STEPS

RANKS = (1, 2, 4, 8, 16, 32)
LOSSES = Path(__file__).parents[1] / "results" / "convergence.json"
PLAIN = Contender("plain", None)
METHOD = "attached"  # has float32 factors, as the shadow does


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, help=f"steps of shadow mode ({STEPS})")
    add("--seeds", type=int, default=3, metavar="N", help="number of seeds, 0 to N - 1 (3)")
    add("--quick", action="store_true", help="tiny models")


def tables_of(record: Record) -> dict[str, Table]:
    title = f"error over {record['steps']} steps, and loss above plain after 300"
    correlation = f"Spearman's correlation of the two: {record['spearman']:.3f}"
    return {f"{title}\n{correlation}": tables.shadow(record, *MODELS)}


def measure(arguments: argparse.Namespace) -> Record:
    losses = json.loads(LOSSES.read_text())
    record: Record = {**provenance(), "steps": arguments.steps, "runs": []}
    runs = {(task, rank): list[float]() for task in MODELS for rank in RANKS}
    todo = [(task, seed) for task in MODELS for seed in range(arguments.seeds)]
    for name, seed in in_turn(todo, lambda run: f"{run[0]}, seed {run[1]}"):
        task = MODELS[name].in_short() if arguments.quick else MODELS[name]
        given = (seed, task, arguments.steps)
        found = ranks.call(errors, 2, *given, what=name, seconds=LIMIT_SECONDS)[0]
        for rank, error in zip(RANKS, found, strict=True):
            runs[name, rank].append(error)
    for (name, rank), found in runs.items():
        above = tables.beyond_plain(losses["tasks"][name]["methods"], f"{METHOD}:{rank}")
        of_rank = {"errors": found, "loss_above_plain": statistics.mean(above)}
        record["runs"].append({"task": name, "rank": rank, **of_rank})
    error = [statistics.mean(run["errors"]) for run in record["runs"]]
    loss = [run["loss_above_plain"] for run in record["runs"]]
    record["spearman"] = round(float(spearmanr(error, loss).statistic), 3)
    return record


def errors(rank: ranks.Rank, seed: int, task: Task, steps: int) -> list[float]:
    """Trains on this rank. Returns the error at each matrix rank."""
    with group(rank, PLAIN, "cpu", seed):
        trainer, _ = task.start(PLAIN, seed)

        def train(number: int) -> None:
            for _ in range(number):
                trainer.mean(trainer.train_step())

        train(EXACT_STEPS)
        shadow = tp.shadow(trainer.ddp, RANKS, steps, {"wire_dtype": None})
        train(steps)
        return [round(shadow.error(compared), 5) for compared in RANKS]
