# SPDX-License-Identifier: BSD-3-Clause
"""Plots the records of bench_convergence.py for docs/convergence.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import report
from cluster.methods import METHODS, find

from convergence import tables

# Okabe and Ito's colors, which color-blind readers can tell apart.
STYLES: dict[str, dict[str, Any]] = {
    "fp16": {"color": "#999999", "marker": "s"},
    "bf16": {"color": "#999999", "marker": "D"},
    "hook-1-bucket": {"color": "#000000", "marker": "s", "linestyle": "--"},
    "attached": {"color": "#56b4e9", "marker": "o"},
    "bf16-wire": {"color": "#0072b2", "marker": "o"},
    "int8-wire": {"color": "#d55e00", "marker": "o"},
    "int4-wire": {"color": "#e69f00", "marker": "o"},
}
# Local steps, with any arguments. A point's label is the number of steps between two rounds.
LOCAL_STYLES: dict[str, dict[str, Any]] = {
    "local-sgd": {"color": "#0072b2", "marker": "^", "linestyle": "none"},
    "diloco": {"color": "#009e73", "marker": "^", "linestyle": "none"},
    "post-local-sgd": {"color": "#999999", "marker": "P", "linestyle": "none"},
    "torchft": {"color": "#cc79a7", "marker": "X", "linestyle": "none"},
}
COLUMNS = 3
AS_GOOD = 0.01  # a mean loss up to this far above plain's counts as equal to plain's
LINEAR = 0.02  # the vertical axis is linear this far on both sides of plain's loss
Point = tuple[float, list[float], str]  # times fewer bytes, losses above plain, label


def draw_losses(record: report.Record, path: Path) -> None:
    """Draws a panel for each task: the loss above plain's against the bytes, a line per method.

    A line connects the means over the seeds at each matrix rank. Bars span the smallest to the
    largest. Of methods with non-default options, only local steps are drawn.
    """
    tasks = [task for task in record["tasks"].values() if "plain" in task["methods"]]
    columns = 2 if len(tasks) == 4 else min(COLUMNS, len(tasks))  # no panel is left empty
    rows = -(-len(tasks) // columns)
    width, height = 1 + 4.4 * columns, 1.2 + 3.6 * rows
    figure, panels = report.panels(rows, columns, width, height, sharex=True)
    for axes in panels.flat[len(tasks) :]:
        axes.remove()
    labels: dict[str, Any] = {}
    for axes, task in zip(panels.flat, tasks, strict=False):
        _draw_task(axes, task["methods"])
        axes.set_title(task["title"].replace(", ", ",\n", 1), fontsize=9)
        labels.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for row in panels:
        row[0].set_ylabel("loss above plain's of the same seed")
    for axes in panels[-1]:
        axes.set_xlabel("times fewer bytes than plain")
    order = [METHODS[name].title for name in (*STYLES, *LOCAL_STYLES)]
    shown = sorted(labels, key=order.index)
    where: dict[str, Any] = {"loc": "upper center", "ncols": min(4, 2 * columns)}
    figure.legend([labels[each] for each in shown], shown, frameon=False, fontsize=8, **where)
    for axes in figure.axes:
        axes.grid(alpha=0.2)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.55 / height))  # below the legend
    report.save(figure, path)


def _lines(methods: tables.Methods) -> dict[str, list[Point]]:
    """The points of each drawn method, by matrix rank."""
    lines: dict[str, list[Point]] = {}
    for name in tables.in_order(methods):
        contender = tables.contender(name)
        base = contender.method.partition("+")[0]
        drawn = base if base in LOCAL_STYLES else contender.method
        if drawn in (*STYLES, *LOCAL_STYLES):
            told = str((contender.every if base in LOCAL_STYLES else contender.rank) or "")
            point = (tables.times_fewer(methods, name), tables.beyond_plain(methods, name), told)
            lines.setdefault(drawn, []).append(point)
    return lines


def _draw_task(axes: Any, methods: tables.Methods) -> None:
    lines = _lines(methods)
    axes.axhspan(-AS_GOOD, AS_GOOD, color="#009e73", alpha=0.12, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.6)
    for name, points in lines.items():
        style = {**STYLES, **LOCAL_STYLES}[name]
        ratios = [ratio for ratio, _, _ in points]
        means = [statistics.mean(beyond) for _, beyond, _ in points]
        bars = [
            [mean - min(beyond) for mean, (_, beyond, _) in zip(means, points, strict=True)],
            [max(beyond) - mean for mean, (_, beyond, _) in zip(means, points, strict=True)],
        ]
        axes.errorbar(
            ratios,
            means,
            yerr=bars,
            label=find(name).title,
            linewidth=1.4,
            elinewidth=0.7,
            markersize=3.5,
            **style,
        )
        for ratio, mean, (_, _, told) in zip(ratios, means, points, strict=True):
            at = {"xytext": (3, 3), "textcoords": "offset points", "color": style["color"]}
            axes.annotate(told, (ratio, mean), fontsize=6, **at)
    _scales(axes, [beyond for line in lines.values() for _, beyond, _ in line])


def _scales(axes: Any, losses: list[list[float]]) -> None:
    """Makes the axes logarithmic, the vertical one on both sides of plain's loss."""
    axes.set_xscale("log")
    report.log_scale(axes.xaxis)
    axes.tick_params(labelbottom=True)  # shared axes only label the last row
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set_yticks([-0.1, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:+g}")
    ends = [-LINEAR, LINEAR, *(end for each in losses for end in (min(each), max(each)))]
    axes.set_ylim(1.2 * min(ends), 1.2 * max(ends))
