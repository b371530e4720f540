# SPDX-License-Identifier: BSD-3-Clause
"""Measures what compression costs in what is learned, by the bytes that it sends.

    python benchmarks/bench_convergence.py --json convergence.json --picture convergence.png
    python benchmarks/bench_convergence.py --resume --json convergence.json --stages front curve
    python benchmarks/bench_convergence.py --show convergence.json --picture convergence.png
    python benchmarks/bench_convergence.py --methods plain attached:4 int8-wire:8,16,32
    python benchmarks/bench_convergence.py --methods plain int8-wire+warm_start_noise=0.2:8
    python benchmarks/bench_convergence.py --methods plain --tasks language-4x --seeds 1 --lr 4e-3

It trains the language model of the examples, smaller than the demo's, their image classifier, and
an LSTM, on two local ranks. Each also trains with the other of two optimizers, and with a global
batch that is four times larger. The methods are a plain all-reduce, torch's hooks and this project.
Runs of one seed have the same initial weights and batches. All methods have the same learning
rates, and all PowerSGD methods the same few exact steps at the start. The seed also sets the random
start of PowerSGD, which alone makes a difference to a short run.

The runs are those of convergence/matrix.py, the most telling first, or those of --methods. A run
takes some seconds, all of them take hours: --resume goes on where the last measurement ended.

The bytes sent are those that a rank writes to its sockets, from the first compressed step on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cluster import contenders
from cluster.contenders import Wanted
from cluster.figures import REFERENCES
from cluster.methods import EXACT_STEPS
from convergence import matrix, ranks
from convergence.matrix import Run
from convergence.tasks import TASKS, Task
from local_ranks import bytes_written
from provenance import processor, provenance, write
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NOT_COMPARED = (*REFERENCES, "author")  # the author's code does not use DDP
QUICK_METHODS = "plain bf16 hook-1-bucket:1 attached:1 bf16-wire:16 int8-wire:4"


def train(make: ranks.Make, task: Task, seed: int) -> dict[str, Any]:
    """Trains on every rank. Returns the validations, and the bytes that this rank has sent."""
    trainees = []

    def wrap(model: nn.Module) -> DistributedDataParallel:
        trainees.append(make(model))
        module = trainees[0].module
        assert isinstance(module, DistributedDataParallel)
        return module

    trainer = task.trainer(seed, wrap)
    args = trainer.args
    if optimizer := trainees[0].optimizer:
        trainer.optimizer, args.lr = optimizer, task.demo_lr
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
    add(
        "--stages",
        nargs="+",
        choices=matrix.STAGES,
        default=list(matrix.STAGES),
        help=f"parts of the matrix of runs, in their order ({' '.join(matrix.STAGES)})",
    )
    add(
        "--methods",
        nargs="+",
        type=_compared,
        metavar="METHOD[+OPTION=VALUE][:RANK,...]",
        help="methods in place of the matrix, each at its own ranks or at those of --ranks",
    )
    add("--tasks", nargs="+", choices=TASKS, help="tasks to train (all of the matrix; 3 models)")
    add(
        "--ranks",
        nargs="+",
        type=int,
        default=[16],
        help="ranks of the approximation for methods that name none (16)",
    )
    add("--seeds", type=int, default=5, metavar="N", help="number of seeds, 0 to N - 1 (5)")
    add("--lr", type=float, help="learning rate (the best of three for plain, by task)")
    add("--quick", action="store_true", help="one seed, tiny models and twelve steps")
    add("--json", type=Path, help="file for the results, written after every run")
    add("--resume", action="store_true", help="keep the runs that the file of --json has")
    add("--left", action="store_true", help="number and time of the runs to do; none is done")
    add("--picture", type=Path, help="file for the picture")
    add("--show", type=Path, metavar="JSON", help="results to show; nothing is trained")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds = 1
        arguments.methods = arguments.methods or [_compared(w) for w in QUICK_METHODS.split()]
    return arguments


def wanted_runs(arguments: argparse.Namespace) -> list[Run]:
    """The runs that the command line asks for, without methods that cannot run here."""
    if arguments.methods:
        chosen = contenders.expand(arguments.methods, arguments.ranks)
        tasks = arguments.tasks or matrix.MODELS
        stages = [matrix.Stage(tasks, " ".join(contender.name for contender in chosen))]
    else:
        stages = [matrix.STAGES[name] for name in arguments.stages]
    runs = matrix.runs(stages, arguments.seeds)
    lacks = {run.contender: run.contender.how.lacks() for run in runs}
    for contender, why in lacks.items():
        if why:
            print(f"left out: {contender.title}: {why}")
    return [
        run
        for run in runs
        if not lacks[run.contender] and (not arguments.tasks or run.task in arguments.tasks)
    ]


def _record(arguments: argparse.Namespace, tasks: dict[str, Task]) -> dict[str, Any]:
    """The record to add runs to, which is empty or the one to resume."""
    settings = {"world": ranks.WORLD, "exact_steps": EXACT_STEPS}
    about = {name: task.about for name, task in tasks.items()}
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
    wanted = wanted_runs(arguments)
    used = {run.task for run in wanted}
    tasks = {name: task for name, task in TASKS.items() if name in used}
    if arguments.quick:
        tasks = {name: task.with_arguments(task.quick) for name, task in tasks.items()}
    if arguments.lr:
        tasks = {name: task.with_arguments(f"--lr {arguments.lr}") for name, task in tasks.items()}
    record = _record(arguments, tasks)
    done = {(run["task"], run["seed"], run["name"]) for run in record["runs"]}
    todo = [run for run in wanted if (run.task, run.seed, run.contender.name) not in done]
    if arguments.left:
        _tell_left(todo, record)
    else:
        _run_all(todo, tasks, record, arguments.json)
    return record


def _tell_left(todo: Sequence[Run], record: dict[str, Any]) -> None:
    """Prints the number of runs that each task has left, and their time by those of the record."""
    for task in dict.fromkeys(run.task for run in todo):
        number = sum(run.task == task for run in todo)
        seconds = [run["seconds"] for run in record["runs"] if run["task"] == task]
        time_left = f"{number * sum(seconds) / len(seconds) / 60:.0f} minutes" if seconds else "?"
        print(f"{task}: {number} runs, {time_left}")


def _run_all(
    todo: Sequence[Run], tasks: dict[str, Task], record: dict[str, Any], file: Path | None
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
        for run in todo:
            how, seed = run.contender, run.seed
            progress.update(bar, description=f"{run.task}, seed {seed}, {how.title}")
            began = time.monotonic()
            trained = ranks.run(train, how.method, how.rank or 0, seed, tasks[run.task], seed)
            seconds = round(time.monotonic() - began, 1)
            about = {"task": run.task, "name": how.name, "method": how.title, "rank": how.rank}
            record["runs"].append({**about, "seed": seed, "seconds": seconds, **trained})
            progress.advance(bar)
            write(record, file)


def main() -> None:
    arguments = parse_arguments()
    record = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    if arguments.left:
        return
    from convergence import report

    report.show(record)
    if arguments.picture:
        from convergence import pictures

        pictures.draw(record, arguments.picture)


if __name__ == "__main__":
    main()
