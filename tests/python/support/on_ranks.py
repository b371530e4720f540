# SPDX-License-Identifier: BSD-3-Clause
"""Tests whose bodies run on every rank. A failed assertion on any rank fails the test."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import torch
import torch.distributed as dist

from support import ranks

P = ParamSpec("P")


def on_ranks(
    world_size: int = 2, **setup: Any
) -> Callable[[Callable[Concatenate[int, P], None]], Callable[P, None]]:
    """Turns a function of the rank into a test, which calls it in one process per rank.

    The other arguments are fixtures and parameters, as in any test. An argument ``world_size`` is
    the number of ranks.

    Args:
        world_size: Number of ranks, unless the function has such an argument.
        setup: Keyword arguments of ``ranks.run``.
    """

    def decorate(function: Callable[Concatenate[int, P], None]) -> Callable[P, None]:
        @functools.wraps(function)
        def test(*_: P.args, **arguments: P.kwargs) -> None:
            size: Any = arguments.get("world_size", world_size)
            ranks.run(size, _call, function.__module__, function.__name__, arguments, **setup)

        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())[1:]  # without the rank
        test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def _call(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    test = getattr(importlib.import_module(module), name)
    test.__wrapped__(rank, **arguments)


def all_agree(value: Any, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks have an equal value. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return all(other == values[0] for other in values)


def models_agree(model: torch.nn.Module) -> bool:
    """Whether all ranks have equal parameters. Collective."""
    parts = (torch.view_as_real(p) if p.is_complex() else p for p in model.parameters())
    return all_agree([part.tolist() for part in parts])
