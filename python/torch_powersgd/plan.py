# SPDX-License-Identifier: BSD-3-Clause
"""What would be compressed of a model, and how far: ``python -m torch_powersgd plan``."""

from __future__ import annotations

import torch

from torch_powersgd._core import _C
from torch_powersgd.options import Options

LARGEST_RAW = 3  # that are named below the table


def print_plan(model: torch.nn.Module, options: Options) -> None:
    """A table of the model's parameters: the form in which each is sent, elements, totals."""
    from rich.console import Console
    from rich.table import Table

    core = options._core()
    table = Table(title=f"rank {options.matrix_approximation_rank}")
    for heading in ("parameter", "shape", "sent as", "elements", "sent", "ratio", "bytes"):
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    total = total_sent = total_bytes = 0
    raw: list[tuple[int, str]] = []
    for name, parameter in model.named_parameters():
        rows, cols = _C.matrix_shape(list(parameter.shape), [])
        compressed = _C.should_compress(rows, cols, core)
        rank = _C.effective_rank(rows, cols, core)
        sent = (rows + cols) * rank if compressed else parameter.numel()
        width = 8 if parameter.dtype == torch.float64 else 4  # of factors and raw elements alike
        total, total_sent = total + parameter.numel(), total_sent + sent
        total_bytes += sent * width
        if not compressed:
            raw.append((parameter.numel(), name))
        form = f"{rows} x {cols} at rank {rank}" if compressed else "raw"
        shape = " x ".join(map(str, parameter.shape))
        ratio = f"{parameter.numel() / max(sent, 1):.1f}"
        numbers = (f"{parameter.numel():,}", f"{sent:,}", ratio, f"{sent * width:,}")
        table.add_row(name, shape, form, *numbers)
    table.add_section()
    totals = (f"{total:,}", f"{total_sent:,}", f"{total / max(total_sent, 1):.1f}")
    table.add_row("all", "", "", *totals, f"{total_bytes:,}")
    console = Console()
    console.print(table)
    largest = sorted(raw, reverse=True)[:LARGEST_RAW]
    if largest:
        named = ", ".join(f"{name} ({numel:,})" for numel, name in largest)
        console.print(f"The largest that stay raw: {named}", soft_wrap=True)
