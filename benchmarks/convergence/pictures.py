# SPDX-License-Identifier: BSD-3-Clause
"""Plots the records of bench_convergence.py for docs/convergence.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import report
from cluster.methods import METHODS, Contender, find

from convergence import tables

# Okabe and Ito's colors, which color-blind readers can tell apart; a marker, and a line.
STYLES = {
    "fp16": ("#999999", "s", "-"),
    "hook-1-bucket": ("#000000", "s", "--"),
    "attached": ("#56b4e9", "o", "-"),
    "bf16-wire": ("#0072b2", "o", "-"),
    "int8-wire": ("#d55e00", "o", "-"),
    "int4-wire": ("#e69f00", "o", "-"),
}
LABELED = "hook-1-bucket", "int8-wire"  # lines whose points have their matrix ranks beside them
# Local steps, with any arguments. A point has the steps between two rounds beside it, if not ten.
LOCAL_STYLES = {
    "local-sgd": ("#0072b2", "^", "none"),
    "diloco": ("#009e73", "^", "none"),
    "sparse": ("#000000", "v", "none"),
    "sparse-loco": ("#e69f00", "v", "none"),
    "post-local-sgd": ("#999999", "P", "none"),
    "torchft": ("#cc79a7", "X", "none"),
}
ALL_STYLES = {**STYLES, **LOCAL_STYLES}
PANELS = 3  # the first tasks of a record
USUAL_EVERY = 10
AS_GOOD = 0.01  # a mean loss up to this far above plain's counts as equal to plain's
BAND = f"as good as plain, within {AS_GOOD:g}"
LINEAR = 0.02  # the vertical axis is linear this far on both sides of plain's loss
Point = tuple[float, list[float], str]  # times fewer bytes, losses above plain, label


def draw_losses(record: report.Record, path: Path) -> None:
    """Draws a panel for each task: the loss above plain's against the bytes, a line per method.

    A line connects the means over the seeds at each matrix rank. Bars span the smallest to the
    largest. Of methods with non-default options, only local steps are drawn.
    """
    tasks = [task for task in record["tasks"].values() if "plain" in task["methods"]][:PANELS]
    figure, panels = report.panels(1, len(tasks), 0.6 + 3.2 * len(tasks), 4.2, sharex=True)
    labels: dict[str, Any] = {}
    for axes, task in zip(panels[0], tasks, strict=True):
        _draw_task(axes, task["methods"])
        axes.set_title(task["title"].replace(" on ", "\non ", 1), fontsize=9)
        axes.set_xlabel("times fewer bytes than plain")
        axes.grid(alpha=0.2)
        labels.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    panels[0][0].set_ylabel(f"loss above plain's of the same seed\n(logarithmic beyond {LINEAR:g})")
    order = [*(METHODS[name].title for name in ALL_STYLES), BAND]
    shown = sorted(labels, key=order.index)
    legend = {"loc": "upper center", "ncols": min(4, 2 * len(tasks)), "frameon": False}
    figure.legend([labels[each] for each in shown], shown, fontsize=8, **legend)
    figure.tight_layout(rect=(0, 0, 1, 0.87))  # below the legend
    report.save(figure, path)


def _lines(methods: tables.Methods) -> dict[str, list[Point]]:
    """The points of each drawn method, by matrix rank."""
    lines: dict[str, list[Point]] = {}
    for name in tables.in_order(methods):
        contender = tables.contender(name)
        base = contender.method.partition("+")[0]
        is_local = base in LOCAL_STYLES and "matrix_approximation_rank" not in contender.method
        drawn = base if is_local else contender.method
        if drawn in ALL_STYLES:
            point = (
                tables.times_fewer(methods, name),
                tables.beyond_plain(methods, name),
                _told(contender, drawn),
            )
            lines.setdefault(drawn, []).append(point)
    return lines


def _told(contender: Contender, drawn: str) -> str:
    """What stands beside a point."""
    if drawn in LOCAL_STYLES:
        return "" if contender.every == USUAL_EVERY else str(contender.every)
    return str(contender.rank) if drawn in LABELED else ""


def _draw_task(axes: Any, methods: tables.Methods) -> None:
    lines = _lines(methods)
    axes.axhspan(-AS_GOOD, AS_GOOD, color="#009e73", alpha=0.12, linewidth=0, label=BAND)
    axes.axhline(0, color="black", linewidth=0.6)
    for name, points in lines.items():
        color, marker, linestyle = ALL_STYLES[name]
        ratios, losses, told = zip(*points, strict=True)
        means = [statistics.mean(each) for each in losses]
        spans = [
            (mean - min(each), max(each) - mean) for mean, each in zip(means, losses, strict=True)
        ]
        line = {"color": color, "marker": marker, "linestyle": linestyle, "linewidth": 1.4}
        sizes = {"elinewidth": 0.7, "markersize": 3.5}
        bars = [*zip(*spans, strict=True)]
        axes.errorbar(ratios, means, yerr=bars, label=find(name).title, **line, **sizes)
        beside = {"xytext": (3, 3), "textcoords": "offset points", "color": color, "fontsize": 7}
        for ratio, mean, label in zip(ratios, means, told, strict=True):
            axes.annotate(label, (ratio, mean), **beside)
    _scales(axes, [beyond for line in lines.values() for _, beyond, _ in line])


def _scales(axes: Any, losses: list[list[float]]) -> None:
    """Makes the axes logarithmic, the vertical one on both sides of plain's loss."""
    from matplotlib import ticker

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.tick_params(labelsize=7)
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set_yticks([-0.1, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1], minor=False)
    axes.set_yticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:+g}")
    ends = [-AS_GOOD, LINEAR, *(end for each in losses for end in (min(each), max(each)))]
    axes.set_ylim(1.2 * min(ends), 1.2 * max(ends))
