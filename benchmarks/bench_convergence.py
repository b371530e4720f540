# SPDX-License-Identifier: BSD-3-Clause
"""Measures what compression costs in what is learned, by rank.

    python benchmarks/bench_convergence.py --json convergence.json --picture convergence.png
    python benchmarks/bench_convergence.py --show convergence.json --picture convergence.png
    python benchmarks/bench_convergence.py --methods plain attached:4 bf16-wire:8,16,32

It trains the language model of the examples, smaller than the demo's, and their image classifier on
two local ranks. The methods are a plain all-reduce, torch's fp16 and PowerSGD hooks, and this
project. Runs of one seed have the same initial weights and batches. All methods have the same
learning rates, and all PowerSGD methods the same few exact steps at the start. The seed also sets
the random start of PowerSGD, which alone makes a difference to a short run.

The bytes sent are those that a rank writes to its sockets, from the first compressed step on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import contenders
from cluster.contenders import Contender, Wanted
from cluster.figures import REFERENCES
from cluster.methods import EXACT_STEPS  # finds the examples
from convergence import ranks
from provenance import processor, provenance
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NOT_COMPARED = (*REFERENCES, "author")  # the author's code does not use DDP
DEFAULT_METHODS = "plain fp16 hook-1-bucket:4,16 attached:1,2,4,8,16 bf16-wire:4,8,16,32"
QUICK_METHODS = "plain fp16 hook-1-bucket:1 attached:1 bf16-wire:16"


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
    quick: str  # further arguments, with --quick

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
    """The bytes that this process has handed to write and similar calls, as Gloo does."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no wchar")


def train(make: ranks.Make, task: Task, seed: int) -> dict[str, Any]:
    """Trains on every rank. Returns the validations, and the bytes that this rank has sent."""

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
        trainer.mean(loss)  # keeps the ranks in step
        if trainer.step % args.validate_every == 0 or trainer.step == args.steps:
            validated.append({"step": trainer.step, **trainer.validate()})
    return {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "gradient_bytes": trainer.gradient_bytes,
        "bytes_sent_per_step": round(sent / (args.steps - EXACT_STEPS)),
        **{name: [round(record[name], 5) for record in validated] for name in validated[0]},
    }


def _compared(text: str) -> Wanted:
    wanted = contenders.parse(text)
    if wanted.method in NOT_COMPARED:
        raise argparse.ArgumentTypeError(f"{wanted.method} does not train a DDP module")
    return wanted


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="tasks to train (all)")
    add(
        "--methods",
        nargs="+",
        type=_compared,
        metavar="METHOD[:RANK,...]",
        help=f"methods, each at its own ranks or at those of --ranks ({DEFAULT_METHODS})",
    )
    add(
        "--ranks",
        nargs="+",
        type=int,
        default=[16],
        help="ranks of the approximation for methods that name none (16)",
    )
    add("--seeds", type=int, default=5, metavar="N", help="number of seeds, 0 to N - 1 (5)")
    add("--quick", action="store_true", help="one seed, tiny models and twelve steps")
    add("--json", type=Path, help="file for the results, written after every run")
    add("--resume", action="store_true", help="keep the runs that the file of --json has")
    add("--picture", type=Path, help="file for the picture")
    add("--show", type=Path, metavar="JSON", help="results to show; nothing is trained")
    add("--markdown", action="store_true", help="tables in Markdown")
    arguments = parser.parse_args()
    methods = DEFAULT_METHODS
    if arguments.quick:
        arguments.seeds, methods = 1, QUICK_METHODS
    wanted = arguments.methods or [_compared(word) for word in methods.split()]
    arguments.contenders = contenders.expand(wanted, arguments.ranks)
    return arguments


def _record(arguments: argparse.Namespace, tasks: dict[str, Task]) -> dict[str, Any]:
    """The record to add runs to, which is empty or the one to resume."""
    settings = {"world": ranks.WORLD, "exact_steps": EXACT_STEPS}
    about = {
        name: {"title": task.title, "arguments": task.arguments} for name, task in tasks.items()
    }
    here = provenance(processor())
    if not (arguments.resume and arguments.json and arguments.json.exists()):
        return {**here, **settings, "tasks": about, "runs": []}
    record: dict[str, Any] = json.loads(arguments.json.read_text())
    before = {**{name: record[name] for name in settings}, **record["tasks"]}
    for name, value in {**settings, **about}.items():
        if before.setdefault(name, value) != value:
            raise SystemExit(f"{arguments.json} has other settings: {name} is {before[name]}")
    record["tasks"].update(about)
    if here not in (was := record.setdefault("resumed", [])):
        was.append(here)
    return record


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The record of all runs."""
    tasks = {name: TASKS[name] for name in arguments.tasks}
    if arguments.quick:
        tasks = {name: task.quickened() for name, task in tasks.items()}
    record = _record(arguments, tasks)
    done = {(run["task"], run["seed"], run["method"]) for run in record["runs"]}
    todo = [
        (name, seed, contender)
        for seed in range(arguments.seeds)
        for name in tasks
        for contender in arguments.contenders
        if (name, seed, contender.title) not in done
    ]
    _run_all(todo, tasks, record, arguments.json)
    return record


def _run_all(
    todo: Sequence[tuple[str, int, Contender]],
    tasks: dict[str, Task],
    record: dict[str, Any],
    file: Path | None,
) -> None:
    """Adds the runs to the record, and writes it after each, so that a time limit loses nothing."""
    columns = (
        TextColumn("{task.description:<48}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=len(todo))
        for name, seed, contender in todo:
            progress.update(bar, description=f"{name}, seed {seed}, {contender.title}")
            run = ranks.run(train, contender.method, contender.rank or 0, seed, tasks[name], seed)
            about = {"task": name, "method": contender.title, "rank": contender.rank, "seed": seed}
            record["runs"].append({**about, **run})
            progress.advance(bar)
            if file:
                file.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    arguments = parse_arguments()
    record = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    from convergence import report

    if arguments.markdown:
        print(report.markdown(record), end="")
    else:
        report.show(record)
    if arguments.picture:
        report.draw(record, arguments.picture)


if __name__ == "__main__":
    main()
