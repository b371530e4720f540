# SPDX-License-Identifier: BSD-3-Clause
"""Walks through the API: calls in random order, wrong ones among them, on two ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from walk import WORLD_SIZE, Walk

from support.on_ranks import on_ranks


def _with_group(walk: Walk) -> bool:
    return walk.grouped


def _with_module(walk: Walk) -> bool:
    return walk.grouped and walk.ddp is not None


def _with_handle(walk: Walk) -> bool:
    return walk.grouped and walk.compression is not None


# When each call may be drawn.
CALLS: dict[Callable[[Walk], None], Callable[[Walk], bool]] = {
    Walk.begin: lambda walk: not walk.grouped,
    **dict.fromkeys([Walk.make, Walk.check, Walk.stats, Walk.end], _with_group),
    **dict.fromkeys([Walk.all_reduce, Walk.wrong_collective], _with_group),
    Walk.make_a_group: lambda walk: walk.grouped and len(walk.groups) < 3,
    Walk.destroy_a_group: lambda walk: walk.grouped and bool(walk.groups),
    **dict.fromkeys([Walk.attach, Walk.step, Walk.fail], _with_module),
    Walk.step_without_synchronization: _with_module,
    **dict.fromkeys([Walk.detach, Walk.skip, Walk.set_scale, Walk.save], _with_handle),
    Walk.load: lambda walk: _with_handle(walk) and bool(walk.saved),
}


@pytest.mark.parametrize(
    ("walks", "calls"), [(20, 25), pytest.param(400, 50, marks=pytest.mark.long)]
)
@on_ranks(WORLD_SIZE, backend=None)
def test_walks(rank: int, walks: int, calls: int) -> None:
    for seed in range(walks):
        walk = Walk(rank, seed)
        try:
            walk.run(calls, CALLS)
        except BaseException as error:
            raise AssertionError(f"walk {seed}, after {walk.called}") from error
