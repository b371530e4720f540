# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_powersgd plan MODULE:FACTORY --rank 4"""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import torch

from torch_powersgd._core import _C
from torch_powersgd.options import Options


def _make_model(path: str) -> torch.nn.Module:
    """Calls FACTORY of MODULE, which takes no arguments and returns a module."""
    module_name, _, factory = path.partition(":")
    if not factory:
        raise ValueError(f"MODULE:FACTORY must name a module and a callable in it, got {path!r}")
    sys.path.insert(0, os.getcwd())
    model = getattr(importlib.import_module(module_name), factory)()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{path} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _plan(model: torch.nn.Module, options: Options) -> None:
    from rich.console import Console
    from rich.table import Table

    core = options._core()
    table = Table(title=f"rank {options.matrix_approximation_rank}")
    for heading in ("parameter", "shape", "sent as", "elements", "sent", "ratio"):
        table.add_column(heading, justify="left" if heading == "parameter" else "right")
    total = total_sent = 0
    for name, parameter in model.named_parameters():
        rows, cols = _C.matrix_shape(list(parameter.shape), [])
        compressed = _C.should_compress(rows, cols, core)
        rank = _C.effective_rank(rows, cols, core)
        sent = (rows + cols) * rank if compressed else parameter.numel()
        total, total_sent = total + parameter.numel(), total_sent + sent
        form = f"{rows} x {cols} at rank {rank}" if compressed else "raw"
        shape = " x ".join(map(str, parameter.shape))
        ratio = f"{parameter.numel() / max(sent, 1):.1f}"
        table.add_row(name, shape, form, f"{parameter.numel():,}", f"{sent:,}", ratio)
    table.add_section()
    table.add_row("all", "", "", f"{total:,}", f"{total_sent:,}", f"{total / total_sent:.1f}")
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_powersgd")
    commands = parser.add_subparsers(required=True)
    plan = commands.add_parser("plan", help="what would be compressed, and how far")
    plan.add_argument("model", metavar="MODULE:FACTORY", help="a callable that returns the model")
    plan.add_argument("--rank", type=int, default=1)
    plan.add_argument("--min-compression-rate", type=float, default=2)
    arguments = parser.parse_args()
    try:
        options = Options(
            matrix_approximation_rank=arguments.rank,
            min_compression_rate=arguments.min_compression_rate,
        )
        _plan(_make_model(arguments.model), options)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
