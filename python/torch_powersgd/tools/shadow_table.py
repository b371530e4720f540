# SPDX-License-Identifier: BSD-3-Clause
"""The table of a shadow: the error, the bytes and the time of each layer at each matrix rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch_powersgd.tools.plan import common_prefix, wrapped
from torch_powersgd.tools.shadow_compressors import ShadowedLayer
from torch_powersgd.tools.tables import Table
from torch_powersgd.units import size_text

LARGEST = 10  # layers that the table shows
NAME_WIDTH = 30
HEADINGS = ("parameter", "shape", "matrix rank", "error", "gradient", "sent", "ms")


def table_of(
    layers_at: Mapping[int, Sequence[ShadowedLayer]], errors: Mapping[int, float], steps: int
) -> str:
    """The largest compressed layers, then the whole model, as text.

    Args:
        layers_at: the layers at each matrix rank.
        errors: the error of the whole model at each of them.
        steps: the number of steps.
    """
    by_layer = list(zip(*layers_at.values(), strict=True))
    compressed = [layers for layers in by_layer if any(layer.rank for layer in layers)]
    shown = sorted(compressed, key=lambda layers: -layers[0].bytes_before)[:LARGEST]
    prefix = common_prefix([layers[0].name for layers in shown]) if len(shown) > 1 else ""
    rows = []
    for layers in shown:
        name = wrapped(layers[0].name[len(prefix) :], NAME_WIDTH)
        shape = " x ".join(map(str, layers[0].shape)) or "scalar"
        labels = [(name, shape), *[("", "")] * (len(layers) - 1)]
        rows += [(*label, *_cells(layer)) for label, layer in zip(labels, layers, strict=True)]
    for i, (rank, error) in enumerate(errors.items()):
        label = f"all {len(by_layer)} parameters" if i == 0 else ""
        rows.append((label, "", str(rank), *_numbers(error, layers_at[rank])))
    title = f"Error of the compressed gradients over {steps} steps, which stayed exact."
    about_names = f" All names begin with {prefix}." if prefix else ""
    return f"{title}{about_names}\n\n{Table(HEADINGS, rows)}"


def _cells(layer: ShadowedLayer) -> tuple[str, ...]:
    return (str(layer.rank or "raw"), *_numbers(layer.error, [layer]))


def _numbers(error: float, layers: Sequence[ShadowedLayer]) -> tuple[str, ...]:
    before = sum(layer.bytes_before for layer in layers)
    after = sum(layer.bytes_after for layer in layers)
    milliseconds = sum(layer.milliseconds for layer in layers)
    return f"{error:.3f}", size_text(before), size_text(after), f"{milliseconds:.2f}"
