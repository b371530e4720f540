# SPDX-License-Identifier: BSD-3-Clause
"""The table and the picture of a record, as bench_cluster.py writes it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from provenance import heading
from rich.table import Table

from cluster.figures import REFERENCES

Cell = Callable[[dict[str, Any]], str]


def _number(name: str, form: str, scale: float = 1) -> Cell:
    def cell(figures: dict[str, Any]) -> str:
        value = figures.get(name)
        return form.format(value * scale) if value is not None else "-"

    return cell


def _spread(name: str, form: str) -> Cell:
    def cell(figures: dict[str, Any]) -> str:
        values = figures.get(name, [])
        if values and isinstance(values[0], list):  # by turn
            values = [value for turn in values for value in turn]
        return "..".join(map(form.format, quartiles(values))) if len(values) > 1 else "-"

    return cell


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third; not a number where there are no two values."""
    if len(values) < 2:
        return math.nan, math.nan
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


COLUMNS: dict[str, Cell] = {
    "step": _number("step_ms", "{:.0f}"),
    "quartiles": _spread("milliseconds", "{:.0f}"),
    "above none": _number("above_none_ms", "{:+.0f}"),
    "quartiles ": _spread("above_none_by_round_ms", "{:+.0f}"),
    "above DDP": _number("above_ddp_alone_ms", "{:+.0f}"),
    "predicted": _number("predicted_ms", "{:+.0f}"),
    "sent, MB": _number("tx_bytes_per_step", "{:.3f}", 1e-6),
    "times fewer": _number("times_fewer_bytes", "{:.1f}"),
    "loss": _number("final_loss", "{:.3f}"),
    "s to loss": _number("seconds_to_loss", "{:.1f}"),
    "peak, MB": _number("peak_memory_bytes", "{:.0f}", 1e-6),
    "beyond plain / gradient": _number("memory_beyond_plain_in_gradients", "{:+.2f}"),
    "failed": lambda figures: str(len(figures["failures"]) or ""),
}


def show(record: dict[str, Any]) -> None:
    """Prints a table for every setting.

    Above none, above DDP: less the step without synchronisation, and less that of DDP which
    averages nothing. The latter is what is predicted.
    """
    console = heading(record, f"rank {record['approximation']}")
    for setting in record["settings"]:
        title = f"{setting['model']}, {setting['ranks']} ranks, {setting['rate']}; times in ms"
        if record["cores"] < setting["ranks"] and record["on"] == "cpu":
            title += f" (on {record['cores']} cores: the ranks take turns)"
        table = Table(title=title, title_justify="left")
        table.add_column("", no_wrap=True)
        cells = {
            name: cell
            for name, cell in COLUMNS.items()
            if any(cell(figures) not in ("-", "") for figures in setting["methods"].values())
        }
        for name in cells:
            table.add_column(name.strip(), justify="right", no_wrap=True)
        for method, figures in setting["methods"].items():
            table.add_row(record["titles"][method], *(cell(figures) for cell in cells.values()))
        console.print(table)
        if setting["loss"] is not None:
            console.print(
                f"loss: after {setting['learning_steps']} steps; s to loss: the steps to a loss of"
                f" {setting['loss']:.3f} times the median step; failed: attempts.",
                highlight=False,
            )
    for title, why in record["left_out"].items():
        console.print(f"left out: {title}: {why}", highlight=False)


def draw(record: dict[str, Any], path: Path) -> None:
    """What a step takes above one without synchronisation, and its quartiles over the rounds."""
    import matplotlib

    matplotlib.use("Agg")  # a file is written: no display is needed
    from matplotlib import pyplot, ticker

    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for setting in record["settings"]:
        groups.setdefault((setting["model"], setting["ranks"]), []).append(setting)
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(1.5 + 4.5 * len(groups), 4.2), sharey=True, squeeze=False
    )
    methods = [method for method in record["titles"] if method not in REFERENCES]
    colours = [f"C{i}" for i in range(10)]  # matplotlib's own cycle
    for axes, ((model, ranks), settings) in zip(panels[0], groups.items(), strict=True):
        for i, method in enumerate(methods):
            place = [x + 0.85 * ((i + 0.5) / len(methods) - 0.5) for x in range(len(settings))]
            figures = [setting["methods"].get(method, {}) for setting in settings]
            # Nothing is drawn where it is not above, which a logarithm could not show.
            heights = [max(f.get("above_none_ms", 0), 0) or math.nan for f in figures]
            ranges = [quartiles(f.get("above_none_by_round_ms", [])) for f in figures]
            # No lower than what a logarithm can show.
            low = [
                max(0, h - max(first, 0.1)) for h, (first, _) in zip(heights, ranges, strict=True)
            ]
            high = [max(0, third - h) for h, (_, third) in zip(heights, ranges, strict=True)]
            axes.bar(
                place,
                heights,
                width=0.8 / len(methods),
                yerr=[low, high],
                error_kw={"linewidth": 0.8},
                color=colours[i % len(colours)],
                label=record["titles"][method],
            )
        axes.set_xticks(range(len(settings)), [setting["rate"] for setting in settings])
        axes.set(title=f"{model}, {ranks} ranks", yscale="log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.2)
    panels[0][0].set_ylabel("ms per step above no synchronisation")
    panels[0][-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
