# SPDX-License-Identifier: BSD-3-Clause
"""The tables of a record that bench_convergence.py has written."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from cluster.methods import METHODS
from provenance import heading
from rich.table import Table

Run = dict[str, Any]
Methods = Mapping[str, list[Run]]  # the runs of a task by title, one for each seed
Cell = Callable[[list[Run]], str]
AS_GOOD = 0.01  # the mean loss above plain's up to which a method counts as good as plain


def by_method(record: dict[str, Any], task: str) -> dict[str, list[Run]]:
    """The runs of a task by title: methods in METHODS' order, then by options and rank."""
    result: dict[str, list[Run]] = {}
    for run in sorted(record["runs"], key=_place):
        if run["task"] == task:
            result.setdefault(run["method"], []).append(run)
    return result


def _place(run: Run) -> tuple[int, str, int]:
    base, _, options = curve(run).partition("+")
    return list(METHODS).index(base), options, run["rank"] or 0


def curve(run: Run) -> str:
    """The name of the run's method without its rank."""
    return str(run["name"]).split(":")[0]


def plain_of(methods: Methods) -> list[Run]:
    return methods.get(METHODS["plain"].title, [])


def beyond_plain(runs: list[Run], plain: list[Run]) -> list[float]:
    """The last validation loss above plain's, for the seeds that both have."""
    reference = {run["seed"]: run["validation_loss"][-1] for run in plain}
    return [
        run["validation_loss"][-1] - reference[run["seed"]]
        for run in runs
        if run["seed"] in reference
    ]


def times_fewer(runs: list[Run], plain: list[Run]) -> float | None:
    """How many times fewer bytes the runs send than plain."""
    if not plain:
        return None
    sent = [statistics.mean(run["bytes_sent_per_step"] for run in each) for each in (plain, runs)]
    return float(sent[0] / sent[1])


def _mean(values: list[float], form: str) -> str:
    """The mean, with the smallest and the largest value if there are several."""
    if not values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    spread = f" ({low}..{high})" if len(values) > 1 else ""
    return form.format(statistics.mean(values)) + spread


def verdict(beyond: list[float]) -> str:
    """Says whether the mean is at most AS_GOOD above plain, and whether each seed's loss is."""
    if not beyond:
        return "-"
    if statistics.mean(beyond) > AS_GOOD:
        return "no"
    return "yes" if max(beyond) > AS_GOOD else "yes, every seed"


def _cells(methods: Methods) -> dict[str, Cell]:
    """The columns of a task's table."""
    plain = plain_of(methods)

    def fewer(runs: list[Run]) -> str:
        ratio = times_fewer(runs, plain)
        return "-" if ratio is None else f"{ratio:.1f}"

    def beyond(make: Callable[[list[float]], str]) -> Cell:
        return lambda runs: make(beyond_plain(runs, plain)) if runs is not plain else ""

    def deviation(values: list[float]) -> str:
        return f"{statistics.stdev(values):.3f}" if len(values) > 1 else "-"

    cells: dict[str, Cell] = {
        "times fewer bytes": fewer,
        "validation loss": lambda runs: _mean([r["validation_loss"][-1] for r in runs], "{:.3f}"),
        "above plain": beyond(lambda values: _mean(values, "{:+.3f}")),
        "deviation": beyond(deviation),
        f"within {AS_GOOD} of plain": beyond(verdict),
    }
    if "validation_accuracy" in next(iter(methods.values()))[0]:
        cells["accuracy, %"] = lambda runs: _mean(
            [100 * r["validation_accuracy"][-1] for r in runs], "{:.1f}"
        )
    if len({len(runs) for runs in methods.values()}) > 1:
        cells["seeds"] = lambda runs: str(len(runs))
    return cells


def show(record: dict[str, Any]) -> None:
    """Prints a table for every task."""
    console = heading(record)
    for name, task in record["tasks"].items():
        methods = by_method(record, name)
        if methods:
            console.print(_table(record, task, methods))


def _title(record: dict[str, Any], task: dict[str, Any], methods: Methods) -> str:
    first = next(iter(methods.values()))
    return (
        f"{task['title']}: {first[0]['parameters'] / 1e6:.2f} M parameters, "
        f"{first[0]['step'][-1]} steps, {record['world']} ranks, seeds: {len(first)}"
    )


def _table(record: dict[str, Any], task: dict[str, Any], methods: Methods) -> Table:
    cells = _cells(methods)
    title = f"{_title(record, task, methods)}\n{task['arguments']}"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    for method, runs in methods.items():
        table.add_row(method, *(cell(runs) for cell in cells.values()))
    return table
