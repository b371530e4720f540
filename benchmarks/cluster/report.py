# SPDX-License-Identifier: BSD-3-Clause
"""The tables of a record that bench_cluster.py has written."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from provenance import heading
from rich.table import Table

from cluster import figures as figures_of

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


def _range(name: str, form: str) -> Cell:
    """The smallest and the largest of several values. None is a run that never came that far."""

    def cell(figures: dict[str, Any]) -> str:
        values = [math.inf if value is None else value for value in figures.get(name, [])]
        return "..".join(map(form.format, (min(values), max(values)))) if len(values) > 1 else "-"

    return cell


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile. They are not a number for less than two values."""
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
    "advise": _number("advised_ms", "{:+.0f}"),
    "sent, MB": _number("tx_bytes_per_step", "{:.3f}", 1e-6),
    "times fewer": _number("times_fewer_bytes", "{:.1f}"),
    "loss": _number("final_loss", "{:.3f}"),
    "s to loss": _number("seconds_to_loss", "{:.1f}"),
    "by seed": _range("seconds_to_loss_by_seed", "{:.1f}"),
    "times sooner": _number("times_sooner", "{:.2f}"),
    "by seed ": _range("times_sooner_by_seed", "{:.2f}"),
    "peak, MB": _number("peak_memory_bytes", "{:.0f}", 1e-6),
    "beyond plain / gradient": _number("memory_beyond_plain_in_gradients", "{:+.2f}"),
    "failed": lambda figures: str(len(figures["failures"]) or ""),
}


def show(record: dict[str, Any]) -> None:
    """Prints a table for every setting.

    Above none, above DDP: less the step without synchronization, and less that of DDP which
    averages nothing. The latter is what advise measures beforehand.
    """
    # In older records all methods have one rank, and their titles do not say it.
    rank = record.get("approximation")
    console = heading(record, *([f"rank {rank}"] if rank else []))
    for setting in record["settings"]:
        title = f"{figures_of.title(setting)}; times in ms"
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
                f" {setting['loss']:.3f} times the median step; times sooner: than plain; failed:"
                " attempts.",
                highlight=False,
            )
        if setting.get("mark_shares"):
            console.print(_on_the_way(record, setting))
    for title, why in record["left_out"].items():
        console.print(f"left out: {title}: {why}", highlight=False)


def _on_the_way(record: dict[str, Any], setting: dict[str, Any]) -> Table:
    """The seconds to each of plain's losses, and how many times sooner than plain that is."""
    title = f"{figures_of.title(setting)}; seconds to plain's losses (times sooner than plain)"
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for share, losses in zip(setting["mark_shares"], setting["marks"], strict=True):
        step = round(share * setting["learning_steps"])
        table.add_column(f"{statistics.median(losses):.3f}, of step {step}", justify="right")
    for method, figures in setting["methods"].items():
        if marks := figures.get("marks"):
            table.add_row(record["titles"][method], *map(_seconds, marks))
    return table


def _seconds(mark: dict[str, Any]) -> str:
    if mark.get("seconds_to_loss") is None:
        return "-"
    sooner = f" ({mark['times_sooner']:.2f})" if "times_sooner" in mark else ""
    return f"{mark['seconds_to_loss']:.1f}{sooner}"
