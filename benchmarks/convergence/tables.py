# SPDX-License-Identifier: BSD-3-Clause
"""The tables of docs/convergence.md, from the records of bench_convergence.py.

A cell is how far the last loss is above plain's: the mean over the seeds, the smallest and the
largest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from cluster.methods import METHODS, Contender, named, parse
from report import Record, Table

from convergence.tasks import STAGES

Methods = Mapping[str, Record]  # the bytes and the losses of a task, by the name of the contender


def contender(name: str) -> Contender:
    (found,) = parse(name)
    return found


def in_order(methods: Methods) -> list[str]:
    """The names, in the order of METHODS, then by options and matrix rank."""

    def place(name: str) -> tuple[int, str, int]:
        method, rank = contender(name)
        base, _, options = method.partition("+")
        return list(METHODS).index(base), options, rank or 0

    return sorted(methods, key=place)


def beyond_plain(methods: Methods, name: str) -> list[float]:
    """How far the losses are above plain's with the same seed. Empty if there is no such run."""
    if name not in methods:
        return []
    pairs = zip(methods[name]["losses"], methods["plain"]["losses"], strict=False)
    return [loss - of_plain for loss, of_plain in pairs]


def times_fewer(methods: Methods, name: str) -> float:
    """How many times fewer bytes than plain a method sends."""
    return float(methods["plain"]["bytes_per_step"] / methods[name]["bytes_per_step"])


def losses(record: Record, stage: str, *tasks: str, without: Sequence[str] = ()) -> Table:
    """A row for each method of a stage that all of these tasks have."""
    names = [each.name for each in STAGES[stage].contenders if each.name not in without]
    return _losses(record, names, tasks)


def losses_by_task(record: Record, stage: str, *methods: str) -> Table:
    """A row for each task of a stage, and a column for each of these methods, without bytes."""
    contenders_of = named(" ".join(methods))
    rows = []
    for task in STAGES[stage].tasks:
        found = record["tasks"][task]["methods"]
        cells = (_loss(found, each.name) for each in contenders_of)
        rows.append([task, _spread(found["plain"]["losses"]), *cells])
    return ["", "plain's loss", *(each.title for each in contenders_of)], rows


def all_losses(record: Record, task: str) -> Table:
    """A row for each method that the task has."""
    return _losses(record, in_order(record["tasks"][task]["methods"]), [task])


def _losses(record: Record, names: Iterable[str], tasks: Sequence[str]) -> Table:
    """The losses of each method, and how many times fewer bytes it sends."""
    of_tasks = [record["tasks"][task]["methods"] for task in tasks]
    rows = [["plain's loss", *(_spread(methods["plain"]["losses"]) for methods in of_tasks)]]
    for name in names:
        if name != "plain" and all(name in methods for methods in of_tasks):
            cells = (f"{_loss(of, name)}, {times_fewer(of, name):.0f} x" for of in of_tasks)
            rows.append([contender(name).title, *cells])
    return ["", *tasks], rows


def shadow(record: Record, *tasks: str) -> Table:
    """A row for each matrix rank: shadow mode's error and the loss above plain, for each task."""
    runs = {(run["task"], run["rank"]): run for run in record["runs"]}

    def cell(run: Record) -> str:
        return f"{statistics.mean(run['errors']):.2f}, {run['loss_above_plain']:+.3f}"

    ranks = sorted({rank for _, rank in runs})
    rows = [[str(rank), *(cell(runs[task, rank]) for task in tasks)] for rank in ranks]
    return ["rank", *tasks], rows


def unlike_data(record: Record) -> Table:
    """The residual over the gradient, and the distance from the optimum at the end."""
    distance = "distance from the optimum, last 100 steps"
    rows = []
    for run in record["runs"]:
        figures = (run["largest_ratio"], run["last_distance"])
        cells = ["" if value is None else f"{float(f'{value:.3g}'):g}" for value in figures]
        rows.append([METHODS[run["method"]].title, run["dtype"], *cells])
    return ["", "gradients", "largest residual / gradient", distance], rows


def _loss(methods: Methods, name: str) -> str:
    """The loss above plain's, with the number of seeds if plain has more. May be empty."""
    if not (beyond := beyond_plain(methods, name)):
        return ""
    seeds = f", {len(beyond)} seed{'s' if len(beyond) > 1 else ''}"
    return _spread(beyond, "+") + seeds * (len(beyond) < len(methods["plain"]["losses"]))


def _spread(values: Sequence[float], sign: str = "") -> str:
    figures = (statistics.mean(values), min(values), max(values))
    mean, low, high = (f"{figure:{sign}.3f}" for figure in figures)
    return f"{mean} ({low}..{high})"
