# SPDX-License-Identifier: BSD-3-Clause
"""Tests that run on each of several ranks, where no result has to leave its rank."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from support import ranks

Test = Callable[..., None]


def on_ranks(world_size: int = 2, **settings: Any) -> Callable[[Test], Test]:
    """Decorates a test whose body runs on each rank, and takes the rank as its first argument.

    Args:
        settings: the keyword arguments of ``ranks.run``.
    """

    def decorate(function: Test) -> Test:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            place = function.__module__, function.__name__
            ranks.run(world_size, _call, *place, arguments, **settings)

        # pytest passes an argument for each parameter that it sees.
        _, *parameters = inspect.signature(function).parameters.values()
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def _call(rank: int, module: str, name: str, arguments: dict[str, Any]) -> None:
    # The name is that of the decorated function, so the body itself cannot be pickled.
    getattr(importlib.import_module(module), name).__wrapped__(rank, **arguments)
