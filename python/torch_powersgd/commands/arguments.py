# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that several subcommands share."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_powersgd.option_values import dtype_name
from torch_powersgd.tools.advice import RECOMMENDED

WIRES = ["float32", "bfloat16", "float16", "int8", "int4"]
RECOMMENDED_WIRE = dtype_name(RECOMMENDED.wire_dtype or torch.float32)
FACTORY_FORM = "def make_model(): return MyModel()"
STEP_FORM = "def train_step(model): model(inputs).mean().backward()"


def add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        metavar="MODULE:FACTORY",
        help="function without arguments that returns the model",
    )


def add_ranks(command: argparse.ArgumentParser, default: Sequence[int]) -> None:
    command.add_argument(
        "--ranks", type=int, nargs="+", default=default, metavar="RANK",
        help=f"matrix ranks to compare ({' '.join(map(str, default))})",
    )  # fmt: skip


def add_rate(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--min-compression-rate", type=float, default=2, metavar="RATE",
        help="compress a weight only if its factors are this many times smaller (%(default)s)",
    )  # fmt: skip


def add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device to train on (%(default)s)"
    )


def count(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"a count must be an integer >= 1, got {value}")
    return number


def callable_of(path: str, placeholder: str, form: str, *arguments: object) -> Callable[..., Any]:
    """The callable that MODULE:NAME names. The working directory is searched first.

    Args:
        path: MODULE:NAME.
        placeholder: the name of ``path`` in the usage.
        form: an example of such a function.
        arguments: what it is called with.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{placeholder} must name a module and a callable in it, got {path!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module_name), name)
    if not callable(found):
        raise ValueError(f"{path} must be a callable, got {type(found).__name__}")
    signature = inspect.signature(found)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ValueError(f"{path} must be of the form {form!r}, got {name}{signature}") from None
    result: Callable[..., Any] = found
    return result


def make_model(path: str) -> torch.nn.Module:
    """Calls FACTORY of MODULE, which takes no arguments and returns a module."""
    model = callable_of(path, "MODULE:FACTORY", FACTORY_FORM)()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{path} must return a torch.nn.Module, got {type(model).__name__}")
    return model
