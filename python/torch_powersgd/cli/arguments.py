# SPDX-License-Identifier: BSD-3-Clause
"""Arguments that several subcommands share."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from torch_powersgd.cli.verdict import RECOMMENDED
from torch_powersgd.option_values import dtype_name

WIRES = {"none": None, "bfloat16": "bfloat16", "int8": "int8", "int4": "int4"}
RECOMMENDED_WIRE = dtype_name(RECOMMENDED.wire_dtype or "none")
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
        "--ranks", type=_integers, default=default, metavar="RANK,...",
        help=f"matrix ranks to compare ({','.join(map(str, default))})",
    )  # fmt: skip


def _integers(value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        wanted = "must be integers separated by commas"
        raise argparse.ArgumentTypeError(f"{wanted}, got {value}") from None


def wires(value: str) -> list[str]:
    if set(found := value.split(",")) <= WIRES.keys():
        return found
    wanted = f"must be of {', '.join(WIRES)}, separated by commas"
    raise argparse.ArgumentTypeError(f"{wanted}, got {value}")


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


def fraction(value: str) -> float:
    try:
        return float(Fraction(value))
    except (ValueError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"must be a number such as 1/16, got {value}") from None


def callable_of(path: str, placeholder: str, form: str, *arguments: object) -> Callable[..., Any]:
    """The callable that MODULE:NAME names. The working directory is searched first.

    Any error in the user's code is printed with its traceback, and raised as a ValueError.

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
    if importlib.util.find_spec(module_name.split(".")[0]) is None:
        raise ValueError(f"{placeholder} must name a module that can be imported, got {path!r}")
    with _failures_of(path):
        module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise ValueError(f"module {module_name} has no {name}, got {path!r}")
    found = getattr(module, name)
    if not callable(found):
        raise ValueError(f"{path} must be a callable, got {type(found).__name__}")
    signature = inspect.signature(found)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ValueError(f"{path} must be of the form {form!r}, got {name}{signature}") from None
    result: Callable[..., Any] = _failures_of(path)(found)
    return result


@contextlib.contextmanager
def _failures_of(path: str) -> Iterator[None]:
    """Shows where the user's own code fails, and ends a ``sys.exit`` in it as an error."""
    try:
        yield
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise ValueError(f"{path} failed with {type(error).__name__}: {error}") from None


def make_model(path: str) -> torch.nn.Module:
    """Calls FACTORY of MODULE, which takes no arguments and returns a module."""
    model = callable_of(path, "MODULE:FACTORY", FACTORY_FORM)()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"{path} must return a torch.nn.Module, got {type(model).__name__}")
    if any(map(is_lazy, model.parameters())):
        raise ValueError(f"{path} must call its model once, to initialize the lazy parameters")
    return model
