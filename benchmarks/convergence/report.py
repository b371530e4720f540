# SPDX-License-Identifier: BSD-3-Clause
"""The tables and the picture of a record that bench_convergence.py has written."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from cluster.methods import METHODS
from provenance import heading
from rich.table import Table

matplotlib.use("Agg")  # a file is written: no display is needed
from matplotlib import pyplot, ticker

Run = dict[str, Any]
Cell = Callable[[list[Run]], str]
# Okabe and Ito's colors, which color-blind readers can distinguish, by rank.
COLORS = {
    None: "#000000",
    1: "#d55e00",
    2: "#009e73",
    4: "#0072b2",
    8: "#e69f00",
    16: "#cc79a7",
    32: "#56b4e9",
}
OTHER_COLOR = "#999999"


def by_method(record: dict[str, Any], task: str) -> dict[str, list[Run]]:
    """The runs of a task, one for each seed: methods in METHODS' order, then by rank."""
    result: dict[str, list[Run]] = {}
    for run in record["runs"]:
        if run["task"] == task:
            result.setdefault(run["method"], []).append(run)
    order = [method.title for method in METHODS.values()]
    return dict(
        sorted(
            result.items(),
            key=lambda item: (order.index(item[0].split(", rank ")[0]), item[1][0]["rank"] or 0),
        )
    )


def _plain(methods: dict[str, list[Run]]) -> list[Run]:
    return methods.get(METHODS["plain"].title, [])


def beyond_plain(runs: list[Run], plain: list[Run]) -> list[float]:
    """The last validation loss above plain's, for the seeds that both have."""
    reference = {run["seed"]: run["validation_loss"][-1] for run in plain}
    return [
        run["validation_loss"][-1] - reference[run["seed"]]
        for run in runs
        if run["seed"] in reference
    ]


def _mean(values: list[float], form: str) -> str:
    """The mean, with the smallest and the largest value if there are several."""
    if not values:
        return "-"
    low, high = form.format(min(values)), form.format(max(values))
    spread = f" ({low}..{high})" if len(values) > 1 else ""
    return form.format(statistics.mean(values)) + spread


def show(record: dict[str, Any]) -> None:
    """Prints a table for every task."""
    console = heading(record)
    for name, task in record["tasks"].items():
        methods = by_method(record, name)
        if methods:
            console.print(_table(record, task, methods))


def _cells(methods: dict[str, list[Run]]) -> dict[str, Cell]:
    """The columns of a task's table."""
    plain = _plain(methods)
    cells: dict[str, Cell] = {
        "validation loss": lambda runs: _mean([r["validation_loss"][-1] for r in runs], "{:.3f}"),
        "above plain": lambda runs: (
            _mean(beyond_plain(runs, plain), "{:+.3f}") if runs is not plain else ""
        ),
    }
    if "validation_accuracy" in next(iter(methods.values()))[0]:
        cells["accuracy, %"] = lambda runs: _mean(
            [100 * r["validation_accuracy"][-1] for r in runs], "{:.1f}"
        )
    if len({len(runs) for runs in methods.values()}) > 1:
        cells["seeds"] = lambda runs: str(len(runs))
    cells["sent, %"] = lambda runs: (
        f"{100 * runs[0]['bytes_sent_per_step'] / runs[0]['gradient_bytes']:.1f}"
    )
    return cells


def _title(record: dict[str, Any], task: dict[str, Any], methods: dict[str, list[Run]]) -> str:
    first = next(iter(methods.values()))
    return (
        f"{task['title']}: {first[0]['parameters'] / 1e6:.2f} M parameters, "
        f"{first[0]['step'][-1]} steps, {record['world']} ranks, seeds: {len(first)}"
    )


def _table(record: dict[str, Any], task: dict[str, Any], methods: dict[str, list[Run]]) -> Table:
    cells = _cells(methods)
    title = f"{_title(record, task, methods)}\n{task['arguments']}"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    for method, runs in methods.items():
        table.add_row(method, *(cell(runs) for cell in cells.values()))
    return table


def markdown(record: dict[str, Any]) -> str:
    """The tables of docs/convergence.md."""
    parts = []
    for name, task in record["tasks"].items():
        if not (methods := by_method(record, name)):
            continue
        cells = _cells(methods)
        rows = [["", *cells], ["---"] * (1 + len(cells))]
        rows += [
            [title, *(cell(runs) for cell in cells.values())] for title, runs in methods.items()
        ]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"{_title(record, task, methods)}:\n\n{table}\n")
    return "\n".join(parts)


def _style(runs: list[Run], title: str) -> dict[str, Any]:
    """The style of a line. Its color shows the rank, its dashes show the method."""
    rank = runs[0]["rank"]
    line = ":" if rank is None else "--" if "hook" in title else "-." if "bf16" in title else "-"
    return {"color": COLORS.get(rank, OTHER_COLOR), "linestyle": line}


def draw(record: dict[str, Any], path: Path) -> None:
    """Draws two rows of panels.

    The upper panels show the mean validation loss over the seeds against the steps. The lower ones
    show how far it is above plain's at the end, with a point for each seed.
    """
    tasks = [name for name in record["tasks"] if by_method(record, name)]
    figure, panels = pyplot.subplots(
        2,
        len(tasks),
        figsize=(2.5 + 5 * len(tasks), 8),
        squeeze=False,
        gridspec_kw={"height_ratios": [1.4, 1]},
    )
    for column, name in enumerate(tasks):
        methods = by_method(record, name)
        _draw_curves(panels[0][column], methods)
        panels[0][column].set_title(record["tasks"][name]["title"], fontsize=10)
        _draw_ends(panels[1][column], methods, label=column == 0)
    panels[0][0].set_ylabel("validation loss, mean over the seeds")
    panels[0][0].legend(frameon=False, fontsize=8, loc="upper right")
    finish(figure, path)


def log_scale(axes: Any) -> None:
    """Makes the vertical axis logarithmic, with numbers that can be read."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def finish(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_curves(axes: Any, methods: dict[str, list[Run]]) -> None:
    for title, runs in methods.items():
        by_step = zip(*(run["validation_loss"] for run in runs), strict=True)
        means = [statistics.mean(losses) for losses in by_step]
        axes.plot(runs[0]["step"], means, label=title, linewidth=1.6, **_style(runs, title))
    axes.set_xlabel("step")
    log_scale(axes)


def _draw_ends(axes: Any, methods: dict[str, list[Run]], label: bool) -> None:
    plain = _plain(methods)
    rows = {title: runs for title, runs in methods.items() if runs is not plain}
    for row, (title, runs) in enumerate(rows.items()):
        beyond = beyond_plain(runs, plain)
        color = _style(runs, title)["color"]
        marker = {"markerfacecolor": "none"} if "hook" in title else {}
        axes.plot(beyond, [row] * len(beyond), "o", color=color, **marker)
        if beyond:
            axes.plot(statistics.mean(beyond), row, "|", color=color, markersize=18)
    axes.axvline(0, color=COLORS[None], linewidth=1)
    axes.set_yticks(range(len(rows)), list(rows) if label else [])
    axes.invert_yaxis()
    axes.set_xlabel("last validation loss, above plain's of the same seed")
