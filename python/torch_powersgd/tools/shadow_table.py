# SPDX-License-Identifier: BSD-3-Clause
"""The table of a shadow: the error, the bytes and the time of each layer at each rank."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from torch_powersgd.tools.plan import common_prefix, wrapped
from torch_powersgd.tools.shadow_compressors import ShadowedLayer
from torch_powersgd.units import size_text

LARGEST = 10  # layers that the table shows
NAME_WIDTH = 30
WIDTH = 100


def table_of(
    layers_at: Mapping[int, Sequence[ShadowedLayer]], errors: Mapping[int, float], steps: int
) -> str:
    """The largest compressed layers, then the whole model, as text.

    Args:
        layers_at: the layers at each rank.
        errors: the error of the whole model at each rank.
        steps: the number of steps.
    """
    by_layer = list(zip(*layers_at.values(), strict=True))
    compressed = [layers for layers in by_layer if any(layer.rank for layer in layers)]
    shown = sorted(compressed, key=lambda layers: -layers[0].bytes_before)[:LARGEST]
    prefix = common_prefix([layers[0].name for layers in shown]) if len(shown) > 1 else ""
    table = Table(box=box.SIMPLE)
    for heading in ("parameter", "shape", "rank", "error", "gradient", "sent", "ms"):
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    for layers in shown:
        first = layers[0]
        name = wrapped(first.name[len(prefix) :], NAME_WIDTH)
        shape = " x ".join(map(str, first.shape)) or "scalar"
        for i, layer in enumerate(layers):
            labels = ("", "") if i else (name, shape)
            table.add_row(*labels, *_cells(layer), end_section=i + 1 == len(layers))
    for i, (rank, error) in enumerate(errors.items()):
        label = f"all {len(by_layer)} parameters" if i == 0 else ""
        table.add_row(label, "", str(rank), *_numbers(error, layers_at[rank]))
    text = io.StringIO()
    title = f"Error of the compressed gradients over {steps} steps, which stayed exact."
    text.write(title + (f" All names begin with {prefix}.\n" if prefix else "\n"))
    Console(file=text, width=WIDTH).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


def _cells(layer: ShadowedLayer) -> tuple[str, ...]:
    return (str(layer.rank) if layer.rank else "raw", *_numbers(layer.error, [layer]))


def _numbers(error: float, layers: Sequence[ShadowedLayer]) -> tuple[str, ...]:
    before = sum(layer.bytes_before for layer in layers)
    after = sum(layer.bytes_after for layer in layers)
    milliseconds = sum(layer.milliseconds for layer in layers)
    return f"{error:.3f}", size_text(before), size_text(after), f"{milliseconds:.2f}"
