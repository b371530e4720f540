# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of a record that bench_cluster.py has written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from cluster.figures import REFERENCES, link
from cluster.report import quartiles

matplotlib.use("Agg")  # a file is written: no display is needed
from matplotlib import pyplot, ticker

Setting = dict[str, Any]
OURS, OTHERS = "#d55e00", "#a6a6a6"
_UNITS = {"k": "k", "m": "M", "g": "G"}
_SHORT = {  # a bar's label is short; the text beside the picture says the rest
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


def _link(setting: Setting) -> str:
    """The link of a setting. Its rate, which tc writes, is in the usual notation."""
    return re.sub(r"([kmg])bit", lambda unit: f" {_UNITS[unit[1]]}bit/s", link(setting))


def draw_links(record: dict[str, Any], names: Sequence[str], path: Path) -> None:
    """A panel for each link, and in it a bar for each of these methods: a step's milliseconds.

    The panels have scales of their own. A line is at the step without synchronization. The picture
    is of the first model on the least number of ranks.
    """
    names = [name for name in names if name in record["titles"]]
    first = min(record["settings"], key=lambda setting: setting["ranks"])
    settings = [s for s in record["settings"] if all(s[k] == first[k] for k in ("model", "ranks"))]
    figure, panels = pyplot.subplots(
        1, len(settings), figsize=(7, 0.9 + 0.42 * len(names)), squeeze=False, layout="constrained"
    )
    for axes, setting in zip(panels[0], settings, strict=True):
        _draw_link(axes, setting, names)
    panels[0][0].set_yticks(range(len(names)), [_label(name) for name in names], fontsize=9)
    panels[0][0].tick_params(length=0)
    panels[0][0].get_yticklabels()[-1].set_color(OURS)
    figure.supxlabel("milliseconds per training step (dotted: no synchronization)", fontsize=9)
    _save(figure, path)


def _draw_link(axes: Any, setting: Setting, names: Sequence[str]) -> None:
    methods = setting["methods"]
    values = [methods.get(name, {}).get("step_ms", math.nan) for name in names]
    colors = [OTHERS] * (len(names) - 1) + [OURS]
    bars = axes.barh(range(len(names)), values, height=0.7, color=colors)
    axes.bar_label(bars, [f" {v:,.0f}" if v == v else " failed" for v in values], fontsize=9)
    if none := methods.get("none", {}).get("step_ms"):
        axes.axvline(none, color="black", linestyle=":", linewidth=1)
    axes.set_title(_link(setting), fontsize=10)
    axes.set_xlim(0, 1.3 * max(v for v in values if v == v))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def draw_all(record: dict[str, Any], path: Path) -> None:
    """Draws the time of a step above one without synchronization, with quartiles over rounds."""
    groups: dict[tuple[str, int], list[Setting]] = {}
    for setting in record["settings"]:
        groups.setdefault((setting["model"], setting["ranks"]), []).append(setting)
    figure, panels = pyplot.subplots(
        1,
        len(groups),
        figsize=(1.5 + 4.5 * len(groups), 4.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, ((model, ranks), settings) in zip(panels[0], groups.items(), strict=True):
        _draw_group(axes, settings, record["titles"])
        axes.set_title(f"{model}, {ranks} ranks")
    panels[0][0].set_ylabel("ms per step above no synchronization")
    panels[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    _save(figure, path)


def _draw_group(axes: Any, settings: Sequence[Setting], titles: dict[str, str]) -> None:
    methods = [method for method in titles if method not in REFERENCES]
    for i, method in enumerate(methods):
        place = [x + 0.85 * ((i + 0.5) / len(methods) - 0.5) for x in range(len(settings))]
        figures = [setting["methods"].get(method, {}) for setting in settings]
        # Nothing is drawn where it is not above, which a logarithm could not show.
        heights = [max(f.get("above_none_ms", 0), 0) or math.nan for f in figures]
        ranges = [quartiles(f.get("above_none_by_round_ms", [])) for f in figures]
        # The whiskers end where a logarithm can still show them.
        low = [max(0, h - max(first, 0.1)) for h, (first, _) in zip(heights, ranges, strict=True)]
        high = [max(0, third - h) for h, (_, third) in zip(heights, ranges, strict=True)]
        axes.bar(
            place,
            heights,
            width=0.8 / len(methods),
            yerr=[low, high],
            error_kw={"linewidth": 0.8},
            color=f"C{i % 10}",  # matplotlib's own cycle
            label=titles[method],
        )
    axes.set_xticks(range(len(settings)), [link(setting) for setting in settings])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    pyplot.close(figure)
