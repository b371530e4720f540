# SPDX-License-Identifier: BSD-3-Clause
"""Plots a record of bench_cluster.py: the milliseconds of a step by link and method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report

from cluster.tables import link

OURS, OTHERS = "#d55e00", "#a6a6a6"
_SHORT = {  # short labels for the bars; the text next to the plot explains them
    "plain": "plain all-reduce",
    "hook": "torch's PowerSGD hook",
    "hook-1-bucket": "torch's PowerSGD hook",
    "attached": "torch_powersgd",
    "bf16-wire": "torch_powersgd",
    "int8-wire": "torch_powersgd",
    "int4-wire": "torch_powersgd",
}
_WIRES = {"bf16-wire": ", bfloat16", "int8-wire": ", int8", "int4-wire": ", int4"}


def _label(name: str) -> str:
    method, _, rank = name.partition(":")
    measure = f",\nrank {rank}{_WIRES.get(method, '')}" if rank else ""
    return _SHORT.get(method, method) + measure


def draw_links(record: report.Record, names: Sequence[str], path: Path) -> None:
    """Draws a panel for each link, with a bar for each of these methods: the time of a step.

    Each panel has its own scale, and a line at the time of a step without synchronization. The
    figure shows the first model on the smallest number of ranks.
    """
    names = [name for name in names if name in record["titles"]]
    first = min(record["settings"], key=lambda setting: setting["ranks"])
    settings = [s for s in record["settings"] if all(s[k] == first[k] for k in ("model", "ranks"))]
    height = 0.9 + 0.42 * len(names)
    figure, panels = report.panels(1, len(settings), 7, height, layout="constrained")
    for axes, setting in zip(panels[0], settings, strict=True):
        _draw_link(axes, setting, names)
    panels[0][0].set_yticks(range(len(names)), [_label(name) for name in names], fontsize=9)
    panels[0][0].tick_params(length=0)
    panels[0][0].get_yticklabels()[-1].set_color(OURS)
    figure.supxlabel("milliseconds per training step (dotted: no synchronization)", fontsize=9)
    report.save(figure, path, dpi=200)


def _draw_link(axes: Any, setting: report.Record, names: Sequence[str]) -> None:
    methods = setting["methods"]
    values = [methods.get(name, {}).get("step_ms", math.nan) for name in names]
    colors = [OTHERS] * (len(names) - 1) + [OURS]
    bars = axes.barh(range(len(names)), values, height=0.7, color=colors)
    axes.bar_label(bars, [f" {v:,.0f}" if v == v else " failed" for v in values], fontsize=9)
    if none := methods.get("none", {}).get("step_ms"):
        axes.axvline(none, color="black", linestyle=":", linewidth=1)
    axes.set_title(link(setting), fontsize=10)
    axes.set_xlim(0, 1.3 * max(v for v in values if v == v))
    axes.locator_params(axis="x", nbins=4)
    axes.set_yticks([])
    axes.invert_yaxis()
