# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/convergence.md, from a record that bench_convergence.py has written.

A cell is the mean over the seeds of the last loss above plain's, with the smallest and the largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, cast

from text_tables import Table

from convergence.matrix import STAGES
from convergence.report import Run, beyond_plain, times_fewer

Runs = dict[str, list[Run]]  # of a task by the name of the method, one for each seed
_WIRES = {
    "hook-1-bucket": "torch's hook",
    "attached": "float32",
    "bf16-wire": "bfloat16",
    "int8-wire": "int8",
    "int4-wire": "int4",
}


def front(record: dict[str, Any], *tasks: str) -> Table:
    """The table `losses` of the front."""
    return losses(record, "front", *tasks)


def losses(record: dict[str, Any], stage: str, *tasks: str) -> Table:
    """A row for each method of a stage: the losses, and how many times fewer bytes it sends."""
    runs = [_of_task(record, task) for task in tasks]
    titles = {run["name"]: run["method"] for run in record["runs"]}
    plain = ["plain's loss", *(_spread([_last(run) for run in each["plain"]]) for each in runs)]
    rows = [
        [titles[name], *(f"{_loss(each, name)}, {_fewer(each, name)}" for each in runs)]
        for name in (contender.name for contender in STAGES[stage].contenders)
        if name != "plain" and all(name in each for each in runs)
    ]
    return ["", *tasks], [plain, *rows]


def curve(record: dict[str, Any], task: str) -> Table:
    """The mean loss and the bytes by rank, a row for each, and by wire, a column for each."""
    runs = _of_task(record, task)
    ranks = {run["rank"] for each in runs.values() for run in each if _wire(run) in _WIRES}

    def cell(name: str) -> str:
        beyond = beyond_plain(runs.get(name, []), runs["plain"])
        if not beyond:
            return ""
        return f"{statistics.mean(beyond):+.3f}, {_fewer(runs, name)}{_seeds(beyond, runs)}"

    rows = [[str(rank), *(cell(f"{wire}:{rank}") for wire in _WIRES)] for rank in sorted(ranks)]
    return [f"{task}: rank", *_WIRES.values()], rows


def noise(record: dict[str, Any], wire: str) -> Table:
    """A row for each task and rank, a column for each size of the noise of the warm start."""
    start = f"{wire}+warm_start_noise="
    names = {run["name"] for run in record["runs"] if run["name"].startswith(start)}
    sizes, ranks = (
        sorted({word(name.removeprefix(start).split(":")) for name in names})
        for word in (lambda words: float(words[0]), lambda words: int(words[1]))
    )
    rows = []
    for task in record["tasks"]:
        runs = _of_task(record, task)
        for rank in ranks:
            noisy = [_loss(runs, f"{start}{size}:{rank}") for size in sizes]
            if any(noisy):
                rows.append([task, str(rank), _loss(runs, f"{wire}:{rank}"), *noisy])
    return ["", "rank", "no noise", *(f"noise {size}" for size in sizes)], rows


def shadow(record: dict[str, Any], *tasks: str) -> Table:
    """A row for each rank: the error of shadow mode, and the loss above plain, of each task."""
    runs = {(run["task"], run["rank"]): run for run in record["runs"]}

    def cell(run: Run) -> str:
        return f"{statistics.mean(run['errors']):.2f}, {run['loss_above_plain']:+.3f}"

    ranks = sorted({rank for _, rank in runs})
    rows = [[str(rank), *(cell(runs[task, rank]) for task in tasks)] for rank in ranks]
    return ["rank", *tasks], rows


def _of_task(record: dict[str, Any], task: str) -> Runs:
    result: Runs = {}
    for run in record["runs"]:
        if run["task"] == task:
            result.setdefault(run["name"], []).append(run)
    return result


def _wire(run: Run) -> str:
    return cast(str, run["name"]).split(":")[0]


def _last(run: Run) -> float:
    return cast(float, run["validation_loss"][-1])


def _loss(runs: Runs, name: str) -> str:
    """The loss above plain's, with the number of seeds where plain has more, or nothing."""
    beyond = beyond_plain(runs.get(name, []), runs["plain"])
    if not beyond:
        return ""
    return _spread(beyond, "+") + _seeds(beyond, runs)


def _seeds(beyond: Sequence[float], runs: Runs) -> str:
    """The number of seeds where plain has more, or nothing."""
    if len(beyond) == len(runs["plain"]):
        return ""
    return f", {len(beyond)} seeds" if len(beyond) > 1 else ", 1 seed"


def _spread(values: Sequence[float], sign: str = "") -> str:
    mean, low, high = (
        f"{x:{sign}.3f}" for x in (statistics.mean(values), min(values), max(values))
    )
    return f"{mean} ({low}..{high})"


def _fewer(runs: Runs, name: str) -> str:
    ratio = times_fewer(runs[name], runs["plain"])
    assert ratio is not None  # as there is a plain run
    return f"{ratio:.0f} x"
