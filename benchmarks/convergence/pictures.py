# SPDX-License-Identifier: BSD-3-Clause
"""The picture of a record that bench_convergence.py has written: loss against bytes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from cluster.methods import METHODS, find

from convergence.report import AS_GOOD, Methods, beyond_plain, by_method, curve, plain_of
from convergence.report import times_fewer as fewer

matplotlib.use("Agg")  # a file is written: no display is needed
from matplotlib import pyplot, ticker

# Okabe and Ito's colors, which color-blind readers can distinguish.
STYLES: dict[str, dict[str, Any]] = {
    "fp16": {"color": "#999999", "marker": "s"},
    "bf16": {"color": "#999999", "marker": "D"},
    "hook-1-bucket": {"color": "#000000", "marker": "s", "linestyle": "--"},
    "demo": {"color": "#cc79a7", "marker": "v", "linestyle": "--"},
    "attached": {"color": "#56b4e9", "marker": "o"},
    "bf16-wire": {"color": "#0072b2", "marker": "o"},
    "int8-wire": {"color": "#d55e00", "marker": "o"},
    "int4-wire": {"color": "#e69f00", "marker": "o"},
}
COLUMNS = 3
LINEAR = 0.02  # the losses about plain's within which the vertical axis is linear
Point = tuple[float, list[float], int | None]  # times fewer bytes, losses above plain, rank


def draw(record: dict[str, Any], path: Path) -> None:
    """Draws a panel for each task: the loss above plain's against the bytes, a line a method.

    A line goes through the mean of the seeds at each rank. A bar is from the least to the greatest.
    Methods with other options than their own are not drawn.
    """
    tasks = [name for name in record["tasks"] if plain_of(by_method(record, name))]
    columns = 2 if len(tasks) == 4 else min(COLUMNS, len(tasks))  # no panel is left empty
    rows = -(-len(tasks) // columns)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(1 + 4.4 * columns, 1.2 + 3.6 * rows), squeeze=False, sharex=True
    )
    for axes in panels.flat[len(tasks) :]:
        axes.remove()
    labels: dict[str, Any] = {}
    for axes, name in zip(panels.flat, tasks, strict=False):
        _draw_task(axes, by_method(record, name))
        axes.set_title(record["tasks"][name]["title"].replace(", ", ",\n", 1), fontsize=9)
        labels.update(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for row in panels:
        row[0].set_ylabel("loss above plain's of the same seed")
    for axes in panels[-1]:
        axes.set_xlabel("times fewer bytes than plain")
    order = [METHODS[name].title for name in STYLES]
    shown = sorted(labels, key=order.index)
    where: dict[str, Any] = {"loc": "upper center", "ncols": min(4, 2 * columns)}
    figure.legend([labels[each] for each in shown], shown, frameon=False, fontsize=8, **where)
    finish(figure, path, top=1 - 0.55 / figure.get_figheight())


def _lines(methods: Methods) -> dict[str, list[Point]]:
    """The points of each method that is drawn, by rank."""
    plain = plain_of(methods)
    lines: dict[str, list[Point]] = {}
    for runs in methods.values():
        ratio, beyond = fewer(runs, plain), beyond_plain(runs, plain)
        if (name := curve(runs[0])) in STYLES and ratio is not None and beyond:
            lines.setdefault(name, []).append((ratio, beyond, runs[0]["rank"]))
    return lines


def _draw_task(axes: Any, methods: Methods) -> None:
    lines = _lines(methods)
    axes.axhspan(-AS_GOOD, AS_GOOD, color="#009e73", alpha=0.12, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.6)
    for name, points in lines.items():
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
            **STYLES[name],
        )
        for ratio, mean, (_, _, rank) in zip(ratios, means, points, strict=True):
            at = {"xytext": (3, 3), "textcoords": "offset points", "color": STYLES[name]["color"]}
            axes.annotate("" if rank is None else str(rank), (ratio, mean), fontsize=6, **at)
    _scales(axes, [beyond for line in lines.values() for _, beyond, _ in line])


def _scales(axes: Any, losses: list[list[float]]) -> None:
    """Makes the axes logarithmic, the vertical one on both sides of plain's loss."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.tick_params(labelbottom=True)  # shared axes have none but in the last row
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.set_yticks([-0.1, -0.02, -0.01, 0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
    axes.yaxis.set_major_formatter("{x:+g}")
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    ends = [-LINEAR, LINEAR, *(end for each in losses for end in (min(each), max(each)))]
    axes.set_ylim(1.2 * min(ends), 1.2 * max(ends))


def log_scale(axes: Any) -> None:
    """Makes the vertical axis logarithmic, with numbers that can be read."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def finish(figure: Any, path: Path, top: float = 1) -> None:
    """Writes the figure, whose panels take the part of it that is below `top`."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.tight_layout(rect=(0, 0, 1, top))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
