# SPDX-License-Identifier: BSD-3-Clause
"""Measures how well the errors of shadow mode foretell the losses that compression ends at.

    python benchmarks/bench_shadow.py --json shadow.json
    python benchmarks/bench_shadow.py --show shadow.json

It trains the three models of bench_convergence.py exactly. After as many steps as are exact there,
shadow mode compresses beside the training, with float32 factors of each rank. The losses are those
that bench_convergence.py has recorded for 300 steps. Spearman's correlation compares the order of
the errors with that of the losses, over all ranks and tasks.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from cluster.methods import EXACT_STEPS
from convergence import ranks
from convergence.matrix import MODELS
from convergence.report import beyond_plain
from convergence.tasks import TASKS, Task
from provenance import heading, processor, provenance, write
from rich.progress import track
from scipy.stats import spearmanr
from text_tables import print_tables
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from torch_powersgd.tools.shadow import STEPS

RANKS = (1, 2, 4, 8, 16, 32)
LOSSES = Path(__file__).with_name("results") / "convergence.json"
METHOD = "attached"  # float32 factors, as the shadow's


def errors(
    make: ranks.Make, task: Task, seed: int, compared: list[int], steps: int
) -> dict[str, float]:
    """Trains on every rank. Returns the error at each rank of the approximation."""
    modules: list[DistributedDataParallel] = []

    def wrap(model: nn.Module) -> DistributedDataParallel:
        module = make(model).module
        assert isinstance(module, DistributedDataParallel)
        modules.append(module)
        return module

    trainer = task.trainer(seed, wrap)

    def train(number: int) -> None:
        for _ in range(number):
            trainer.mean(trainer.train_step())

    train(EXACT_STEPS)
    options = {"wire_dtype": torch.float32}
    shadow = tp.shadow(modules[0], compared, steps, options)
    train(steps)
    return {str(rank): round(shadow.error(rank), 5) for rank in compared}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    losses = json.loads(arguments.losses.read_text())
    record: dict[str, Any] = {**provenance(processor()), "steps": arguments.steps, "runs": []}
    for task in MODELS:
        quick = TASKS[task].quick if arguments.quick else ""
        trained = TASKS[task].with_arguments(quick)
        runs = [run for run in losses["runs"] if run["task"] == task]
        plain = [run for run in runs if run["name"] == "plain"]
        found = [
            ranks.run(errors, "plain", 0, seed, trained, seed, list(RANKS), arguments.steps)
            for seed in track(range(arguments.seeds), description=task)
        ]
        for rank in RANKS:
            compressed = [run for run in runs if run["name"] == f"{METHOD}:{rank}"]
            record["runs"].append(
                {
                    "task": task,
                    "rank": rank,
                    "errors": [each[str(rank)] for each in found],
                    "loss_above_plain": statistics.mean(beyond_plain(compressed, plain)),
                }
            )
        write(record, arguments.json)
    error = [statistics.mean(run["errors"]) for run in record["runs"]]
    loss = [run["loss_above_plain"] for run in record["runs"]]
    record["spearman"] = round(float(spearmanr(error, loss).statistic), 3)
    write(record, arguments.json)
    return record


def show(record: dict[str, Any]) -> None:
    console = heading(record)
    title = f"error over {record['steps']} steps, and loss above plain after 300"
    rows = []
    for run in record["runs"]:
        error = statistics.mean(run["errors"])
        above = f"{run['loss_above_plain']:+.3f}"
        rows.append([run["task"], str(run["rank"]), f"{error:.3f}", above])
    print_tables(console, {title: (["task", "rank", "error", "loss above plain"], rows)})
    console.print(f"Spearman's correlation of the two: {record['spearman']:.3f}", highlight=False)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=STEPS, help=f"steps of the shadow ({STEPS})")
    add("--seeds", type=int, default=3, metavar="N", help="number of seeds, 0 to N - 1 (3)")
    add("--losses", type=Path, default=LOSSES, help="record of bench_convergence.py (results/)")
    add("--quick", action="store_true", help="one seed, tiny models and two steps")
    add("--json", type=Path, help="file for the results, written after every task")
    add("--show", type=Path, metavar="JSON", help="results to show; nothing is trained")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps = 1, 2
    return arguments


def main() -> None:
    arguments = parse_arguments()
    show(json.loads(arguments.show.read_text()) if arguments.show else measure(arguments))


if __name__ == "__main__":
    main()
