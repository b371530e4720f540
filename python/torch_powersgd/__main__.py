# SPDX-License-Identifier: BSD-3-Clause
"""python -m torch_powersgd plan MODULE:FACTORY --rank 4
torchrun ... -m torch_powersgd advise MODULE:FACTORY
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import sys

import torch

from torch_powersgd.advise import print_advice
from torch_powersgd.options import Options
from torch_powersgd.plan import print_plan


def _make_model(path: str) -> torch.nn.Module:
    """Calls FACTORY of MODULE, which takes no arguments and returns a module."""
    module_name, _, factory = path.partition(":")
    if not module_name or not factory:
        raise ValueError(f"MODULE:FACTORY must name a module and a callable in it, got {path!r}")
    sys.path.insert(0, os.getcwd())
    make = getattr(importlib.import_module(module_name), factory)
    if not callable(make):
        raise ValueError(f"{path} must be a callable, got {type(make).__name__}")
    model = make()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{path} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"the name of a dtype of torch, got {name!r}")
    return dtype


def _milliseconds(value: str) -> float:
    milliseconds = float(value)
    if not 0 <= milliseconds < math.inf:
        raise argparse.ArgumentTypeError(f"at least 0, got {value}")
    return milliseconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_powersgd")
    commands = parser.add_subparsers(required=True, dest="command")
    plan = commands.add_parser("plan", help="what would be compressed, and how far")
    plan.add_argument("--rank", type=int, default=1)
    advise = commands.add_parser(
        "advise", help="under torchrun: whether compression pays here, and at which rank"
    )
    advise.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    advise.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for command in (plan, advise):
        command.add_argument(
            "model", metavar="MODULE:FACTORY", help="a callable that returns the model"
        )
        command.add_argument("--min-compression-rate", type=float, default=2)
    advise.add_argument("--wire-dtype", type=_dtype, help="float32, bfloat16 or float16")
    advise.add_argument("--alternating", action="store_true", help="P and Q in turns")
    advise.add_argument(
        "--backward-ms",
        type=_milliseconds,
        help="of a step without averaging, behind which averaging hides; default: 200 to 400",
    )
    return parser


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    is_plan = arguments.command == "plan"
    ranks = [arguments.rank] if is_plan else arguments.ranks
    try:
        options = [
            Options(
                matrix_approximation_rank=rank,
                min_compression_rate=arguments.min_compression_rate,
                start_powerSGD_iter=0,
                wire_dtype=None if is_plan else arguments.wire_dtype,
                alternating=not is_plan and arguments.alternating,
            )
            for rank in ranks
        ]
        model = _make_model(arguments.model)
        if is_plan:
            print_plan(model, options[0])
        else:
            backward = arguments.backward_ms
            seconds = None if backward is None else backward / 1e3
            print_advice(model, options, arguments.device, seconds)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
