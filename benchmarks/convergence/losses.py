# SPDX-License-Identifier: BSD-3-Clause
"""Measures the final loss of each method and the bytes that it sends.

It trains the examples' language model (smaller than the demo's), their image classifier and an
LSTM, in two local processes. Each also trains with a second optimizer, and with a global batch four
times as large. The methods are a plain all-reduce, torch's hooks and this project. Runs with the
same seed share initial weights and batches. All methods use the same learning rates, and all
PowerSGD methods begin with the same few exact steps. The seed also sets PowerSGD's random start,
which by itself changes the loss of a short run.

The runs are those in convergence/matrix.py, the most informative first, or those of --methods:
METHOD, METHOD:RANK,RANK or METHOD+OPTION=VALUE:RANK. One run takes seconds, all of them take hours.
--resume continues after the last finished run.

The bytes sent are those that a process writes to its sockets, from the first compressed step on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import methods
from cluster.methods import Contender
from cluster.rank import group
from cluster.trainees import EXACT_STEPS, Trainee
from launcher import ranks
from process import bytes_written
from report import Record, Table, in_turn, processor, provenance, write
from torch import nn

from convergence import matrix, pictures, tables
from convergence.matrix import Run
from convergence.tasks import TASKS, Task

NOT_COMPARED = (*methods.REFERENCES, "author")  # the author's code does not use DDP
QUICK_METHODS = "plain bf16 hook-1-bucket:1 attached:1 bf16-wire:16 int8-wire:4"

LIMIT_SECONDS = 1800  # of a run; if it hangs, the limit of its collectives ends it earlier

draw = pictures.draw_losses

ranks.preload("sklearn.datasets")  # for the image classifier


def _compared(text: str) -> list[Contender]:
    found = methods.parse(text)
    if found[0].method in NOT_COMPARED:
        raise argparse.ArgumentTypeError(f"{found[0].method} does not train a DDP module")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    stages = list(matrix.STAGES)
    parts = f"stages of the run matrix, in this order ({' '.join(stages)})"
    usual = [stage for stage in stages if stage not in (matrix.LOCAL, matrix.LONG)]
    add("--stages", nargs="+", choices=stages, default=usual, metavar="STAGE", help=parts)
    methods = "methods to run instead of the matrix"
    add("--methods", nargs="+", type=_compared, metavar="METHOD", help=methods)
    tasks = f"tasks of {' '.join(TASKS)} (all of the matrix; with --methods, 3 models)"
    add("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=tasks)
    add("--seeds", type=int, default=5, metavar="N", help="number of seeds, 0 to N - 1 (5)")
    add("--ranks", type=int, default=2, help="number of local processes (2)")
    add("--lr", type=float, help="learning rate (the best of three for plain, by task)")
    add("--quick", action="store_true", help="one seed, tiny models and twelve steps")
    add("--resume", action="store_true", help="keep the runs that are already in the --json file")
    add("--picture", type=Path, help="file for the picture")


def tables_of(record: Record) -> dict[str, Table]:
    return {
        f"{task['title']}: {task['parameters'] / 1e6:.2f} M parameters, {record['world']} ranks\n"
        f"{task['arguments']}": tables.all_losses(record, name)
        for name, task in record["tasks"].items()
        if "plain" in task["methods"]
    }


def measure(arguments: argparse.Namespace) -> Record:
    """The record of all runs, including those that --resume keeps."""
    if arguments.quick:
        arguments.seeds = 1
        arguments.methods = arguments.methods or [_compared(w) for w in QUICK_METHODS.split()]
    wanted = wanted_runs(arguments)
    tasks = {name: _task(name, arguments) for name in dict.fromkeys(run.task for run in wanted)}
    record = _record(arguments, tasks)

    def methods_of(run: Run) -> Record:
        found: Record = record["tasks"][run.task]["methods"]
        return found

    # A method's seeds run in order, so a seed is an index into its list of losses.
    done: Record = {"losses": []}
    todo = [
        run
        for run in wanted
        if run.seed >= len(methods_of(run).get(run.contender.name, done)["losses"])
    ]
    for run in in_turn(todo, lambda run: f"{run.task}, seed {run.seed}, {run.contender.title}"):
        of_run = (run.contender, run.seed, tasks[run.task])
        what = f"{run.task}, {run.contender.title}"
        found = ranks.call(train, record["world"], *of_run, what=what, seconds=LIMIT_SECONDS)[0]
        record["tasks"][run.task] |= {name: found[name] for name in ("parameters", "untrained")}
        new = {"bytes_per_step": found["bytes_per_step"], "losses": []}
        methods_of(run).setdefault(run.contender.name, new)["losses"].append(found["loss"])
        write(record, arguments.json)
    return record


def wanted_runs(arguments: argparse.Namespace) -> list[Run]:
    """The runs that the command line requests, without methods that cannot run here."""
    stages = [matrix.STAGES[name] for name in arguments.stages]
    if arguments.methods:
        chosen = methods.joined(arguments.methods)
        tasks = arguments.tasks or matrix.MODELS
        stages = [matrix.Stage(tasks, " ".join(contender.name for contender in chosen))]
    runs = [
        run
        for run in matrix.runs(stages, arguments.seeds)
        if not arguments.tasks or run.task in arguments.tasks
    ]
    for contender in dict.fromkeys(run.contender for run in runs):
        if contender.lacks:
            print(f"left out: {contender.title}: {contender.lacks}")
    return [run for run in runs if not run.contender.lacks]


def _task(name: str, arguments: argparse.Namespace) -> Task:
    task = TASKS[name]
    if arguments.quick:
        task = task.with_arguments(task.quick)
    return task.with_arguments(f"--lr {arguments.lr}") if arguments.lr else task


def _record(arguments: argparse.Namespace, tasks: dict[str, Task]) -> Record:
    """The record to add runs to: an empty one, or that of --json if its tasks are the same."""
    here = provenance(processor())
    about = {name: {**task.about, "methods": {}} for name, task in tasks.items()}
    if not (arguments.resume and arguments.json and arguments.json.exists()):
        return {**here, "world": arguments.ranks, "exact_steps": EXACT_STEPS, "tasks": about}
    record: Record = json.loads(arguments.json.read_text())
    for name, task in about.items():
        before = record["tasks"].setdefault(name, task)["arguments"]
        if before != task["arguments"]:
            raise SystemExit(f"{arguments.json} has other settings: {name} is {before}")
    if here not in (resumed := record.setdefault("resumed", [])):
        resumed.append(here)
    return record


def train(rank: ranks.Rank, contender: Contender, seed: int, task: Task) -> dict[str, Any]:
    """Trains on this rank. Returns the validation losses and the bytes that this rank sends."""
    with group(rank, contender, "cpu", seed):
        trainees: list[Trainee] = []

        def wrap(model: nn.Module) -> nn.Module:
            trainees.append(contender.make(model, seed))
            return trainees[0].module

        trainer = task.trainer(seed, wrap)
        steps = trainer.args.steps
        trainer.optimizer = trainees[0].optimized_by(trainer.optimizer)
        untrained = trainer.validate()["validation_loss"]
        before = 0
        for step in range(steps):
            if step == EXACT_STEPS:
                before = bytes_written()
            loss = trainer.train_step()
            trainer.mean(loss)  # keeps the processes in step
        # A round of local steps may be in flight during the mean, so both are counted together.
        sent = bytes_written() - before - (steps - EXACT_STEPS) * _bytes_of(trainer.mean)
        trainees[0].end()
        return {
            "parameters": sum(p.numel() for p in trainer.model.parameters()),
            "bytes_per_step": round(sent / (steps - EXACT_STEPS)),
            "untrained": round(untrained, 5),
            "loss": round(trainer.validate()["validation_loss"], 5),
        }


def _bytes_of(mean: Callable[[float], float]) -> float:
    """The bytes that this rank sends for a mean."""
    count, before = 8, bytes_written()
    for _ in range(count):
        mean(0.0)
    return (bytes_written() - before) / count
