# SPDX-License-Identifier: BSD-3-Clause
"""Runs a function in one local process for each rank of a method's group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cluster.methods import find
from cluster.trainees import Trainee
from launcher import ranks
from torch import nn

WORLD = 2
_LIMIT_SECONDS = 1800  # of a run; if it hangs, the limit of its collectives ends it earlier
_COLLECTIVE_SECONDS = 120

ranks.preload("sklearn.datasets")  # for the image classifier

Make = Callable[[nn.Module], Trainee]


def run(
    function: Callable[..., Any],
    method: str,
    approximation: int,
    seed: int,
    *args: Any,
    world: int = WORLD,
) -> Any:
    """Calls function(make, *args) on every rank, and returns rank 0's result.

    Args:
        function: the function to call. Its first argument is the method's factory.
        method: the name of the method.
        approximation: the matrix rank.
        seed: the seed of the method's random start.
        args: further arguments of the function.
        world: the number of ranks.
    """
    chosen = (function, method, approximation, seed, args)
    return ranks.call(_rank, world, *chosen, what=method, seconds=_LIMIT_SECONDS)[0]


def _rank(
    rank: ranks.Rank,
    function: Callable[..., Any],
    method: str,
    approximation: int,
    seed: int,
    args: tuple[Any, ...],
) -> Any:
    chosen = find(method)
    options = chosen.options(approximation, seed) if chosen.options else None
    with rank.group(chosen.backend["cpu"], _COLLECTIVE_SECONDS, options):
        return function(lambda model: chosen.make(model, approximation, seed), *args)
