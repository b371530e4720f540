# SPDX-License-Identifier: BSD-3-Clause
"""What does compression cost in what is learned, by its rank?

    python benchmarks/bench_convergence.py --json convergence.json --picture convergence.png
    python benchmarks/bench_convergence.py --show convergence.json --picture convergence.png

Trains the examples' language model, smaller than the demo's, and their image classifier, on two
local ranks: with a plain all-reduce, with torch's fp16 and PowerSGD hooks and with this project.
What has the same seed has the same initial weights and batches; every method has the same learning
rates, and every PowerSGD the same few exact steps at the start. The seed is also that of a
PowerSGD's random start, which alone makes a difference to a short run.

What is sent is counted in what a rank writes to its sockets, from the first compressed step on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.figures import REFERENCES
from cluster.methods import EXACT_STEPS, METHODS  # finds the examples
from convergence import ranks
from provenance import processor, provenance
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

UNRANKED = ("plain", "fp16", "bf16")  # the methods that have no approximation
NOT_COMPARED = (*REFERENCES, "author")  # the author's is not in DDP
DEFAULT_METHODS = ["plain", "fp16", "hook-1-bucket", "attached"]


def _language() -> tuple[argparse.ArgumentParser, Callable[..., Any]]:
    import train_lm

    return train_lm.options(), train_lm.LanguageTrainer


def _digits() -> tuple[argparse.ArgumentParser, Callable[..., Any]]:
    import train_digits

    return train_digits.options(), train_digits.DigitTrainer


@dataclass(frozen=True)
class Task:
    title: str
    example: Callable[[], tuple[argparse.ArgumentParser, Callable[..., Any]]]
    arguments: str  # of the example
    quick: str  # further ones, with --quick

    def quickened(self) -> Task:
        return replace(self, arguments=f"{self.arguments} {self.quick}")


TASKS = {
    "language": Task(
        "character GPT on the standard library, AdamW",
        _language,
        "--layers 3 --width 192 --heads 6 --batch 2 --lr 2e-3 --steps 300 --validate-every 20",
        "--layers 1 --width 64 --heads 2 --steps 12 --characters 200000 --validate-every 12",
    ),
    "digits": Task(
        "convolutional net on scikit-learn's digits, SGD with momentum",
        _digits,
        "--steps 300 --validate-every 10",
        "--channels 16 --width 64 --steps 12 --warmup 3 --validate-every 12",
    ),
}


def bytes_written() -> int:
    """What this process has handed to write and its like, which is how Gloo sends."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no wchar")


def train(make: ranks.Make, task: Task, seed: int) -> dict[str, Any]:
    """One run, on every rank: what was validated, and what this rank has sent."""

    def wrap(model: nn.Module) -> DistributedDataParallel:
        module = make(model).module
        assert isinstance(module, DistributedDataParallel)
        return module

    parser, trainer_of = task.example()
    args = parser.parse_args([*task.arguments.split(), "--seed", str(seed)])
    trainer = trainer_of(args, wrap)
    validated = [{"step": 0, **trainer.validate()}]
    sent = 0
    for step in range(args.steps):
        before = bytes_written()
        loss = trainer.train_step()
        if step >= EXACT_STEPS:
            sent += bytes_written() - before
        trainer.mean(loss)  # the ranks go in step
        if trainer.step % args.validate_every == 0 or trainer.step == args.steps:
            validated.append({"step": trainer.step, **trainer.validate()})
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "gradient_bytes": trainer.gradient_bytes,
        "bytes_sent_per_step": round(sent / (args.steps - EXACT_STEPS)),
        **{name: [round(record[name], 5) for record in validated] for name in validated[0]},
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    methods = [name for name in METHODS if name not in NOT_COMPARED]
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--methods", nargs="+", choices=methods, default=DEFAULT_METHODS)
    add("--ranks", nargs="+", type=int, default=[1, 2, 4], help="of the approximation (1 2 4)")
    add("--seeds", type=int, default=3, metavar="N", help="0 to N - 1 (3)")
    add("--quick", action="store_true", help="one seed, rank 1, tiny models, twelve steps")
    add("--json", type=Path, help="write the results here, after every run")
    add("--picture", type=Path, help="draw them here")
    add("--show", type=Path, metavar="JSON", help="train nothing: show these results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.ranks = 1, [1]
    return arguments


def contenders(arguments: argparse.Namespace) -> Iterator[tuple[str, int | None]]:
    """The methods, each at every rank if it has one."""
    for method in arguments.methods:
        for rank in [None] if method in UNRANKED else arguments.ranks:
            yield method, rank


def title(method: str, rank: int | None) -> str:
    return METHODS[method].title + (f", rank {rank}" if rank else "")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record of all runs."""
    tasks = {name: TASKS[name] for name in arguments.tasks}
    if arguments.quick:
        tasks = {name: task.quickened() for name, task in tasks.items()}
    record: dict[str, Any] = {
        **provenance(processor()),
        "world": ranks.WORLD,
        "exact_steps": EXACT_STEPS,
        "tasks": {
            name: {"title": task.title, "arguments": task.arguments} for name, task in tasks.items()
        },
        "runs": [],
    }
    todo = [
        (name, seed, *contender)
        for seed in range(arguments.seeds)
        for name in tasks
        for contender in contenders(arguments)
    ]
    columns = (
        TextColumn("{task.description:<48}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(todo))
        for name, seed, method, rank in todo:
            progress.update(bar, description=f"{name}, seed {seed}, {title(method, rank)}")
            run = ranks.run(train, method, rank or 0, seed, tasks[name], seed)
            about = {"task": name, "method": title(method, rank), "rank": rank, "seed": seed}
            record["runs"].append({**about, **run})
            progress.advance(bar)
            if arguments.json:  # at once: what is measured is not lost to a time limit
                arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return record


def main() -> None:
    arguments = parse_arguments()
    record = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    from convergence import report

    report.show(record)
    if arguments.picture:
        report.draw(record, arguments.picture)


if __name__ == "__main__":
    main()
