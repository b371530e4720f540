# SPDX-License-Identifier: BSD-3-Clause
"""Measures the final loss of each method and the bytes that it sends.

It trains the examples' language model (smaller than the demo's), their image classifier and an
LSTM, in two local processes. Each also trains with a second optimizer, and with a global batch four
times as large. The methods are a plain all-reduce, torch's hooks and this project. Runs with the
same seed share initial weights and batches. All methods use the same learning rates, and all
PowerSGD methods begin with the same few exact steps. The seed also sets PowerSGD's random start,
which by itself changes the loss of a short run.

The runs are those of the stages in convergence/tasks.py, or those of --methods: METHOD,
METHOD:RANK,RANK or METHOD+OPTION=VALUE:RANK. One run takes seconds, all of them take hours.
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
from cluster.trainees import EXACT_STEPS
from launcher import ranks
from process import bytes_written
from report import Record, Table, in_turn, provenance, write

from convergence import pictures, tables
from convergence.tasks import MODELS, STAGES, TASKS, USUAL, Run, Stage, Task, runs

NOT_COMPARED = (*methods.REFERENCES, "author")  # the author's code does not use DDP
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
    stages = f"stages of {' '.join(STAGES)}, in their order ({' '.join(USUAL)})"
    add("--stages", nargs="+", choices=STAGES, default=USUAL, metavar="STAGE", help=stages)
    instead = "methods to run instead of the stages'"
    add("--methods", nargs="+", type=_compared, metavar="METHOD", help=instead)
    tasks = f"tasks of {' '.join(TASKS)} (all of the stages; with --methods, 3 models)"
    add("--tasks", nargs="+", choices=TASKS, metavar="TASK", help=tasks)
    add("--seeds", type=int, default=5, metavar="N", help="number of seeds, 0 to N - 1 (5)")
    add("--ranks", type=int, default=2, help="number of local processes (2)")
    add("--lr", type=float, help="learning rate (the best of three for plain, by task)")
    add("--quick", action="store_true", help="tiny models and twelve steps")
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
    wanted = _wanted_runs(arguments)
    tasks = {name: _task(name, arguments) for name in dict.fromkeys(run.task for run in wanted)}
    record = _record(arguments, tasks)

    def losses_of(run: Run) -> list[float]:
        # A method's seeds run in order, so a seed is an index into this list.
        found = record["tasks"][run.task]["methods"].get(run.contender.name, {"losses": []})
        losses: list[float] = found["losses"]
        return losses

    todo = [run for run in wanted if run.seed >= len(losses_of(run))]
    for run in in_turn(todo, lambda run: run.title):
        given = (run.contender, run.seed, tasks[run.task])
        found = ranks.call(train, record["world"], *given, what=run.title, seconds=LIMIT_SECONDS)[0]
        of_task = record["tasks"][run.task]
        of_task |= {name: found[name] for name in ("parameters", "untrained")}
        new = {"bytes_per_step": found["bytes_per_step"], "losses": []}
        of_task["methods"].setdefault(run.contender.name, new)["losses"].append(found["loss"])
        write(record, arguments.json)
    return record


def _wanted_runs(arguments: argparse.Namespace) -> list[Run]:
    """The runs that the command line requests, without methods that cannot run here."""
    stages = [STAGES[name] for name in arguments.stages]
    if arguments.methods:
        names = [contender.name for contender in methods.joined(arguments.methods)]
        stages = [Stage(arguments.tasks or [*MODELS], " ".join(names))]
    found = [
        run
        for run in runs(stages, arguments.seeds)
        if not arguments.tasks or run.task in arguments.tasks
    ]
    for contender in dict.fromkeys(run.contender for run in found):
        if contender.lacks:
            print(f"left out: {contender.title}: {contender.lacks}")
    return [run for run in found if not run.contender.lacks]


def _task(name: str, arguments: argparse.Namespace) -> Task:
    task = TASKS[name].in_short() if arguments.quick else TASKS[name]
    return task.but(f"--lr {arguments.lr}") if arguments.lr else task


def _record(arguments: argparse.Namespace, tasks: dict[str, Task]) -> Record:
    """The record to add runs to: an empty one, or that of --json if its tasks are the same."""
    here = provenance()
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
        trainer, trainee = task.start(contender, seed)
        steps = trainer.args.steps
        untrained = trainer.validate()["validation_loss"]
        before = 0
        for step in range(steps):
            if step == EXACT_STEPS:
                before = bytes_written()
            trainer.mean(trainer.train_step())  # the mean keeps the processes in step
        # A round of local steps may be in flight during the mean, so both are counted together.
        sent = bytes_written() - before - (steps - EXACT_STEPS) * _bytes_of(trainer.mean)
        trainee.end()
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
