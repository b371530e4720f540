# SPDX-License-Identifier: BSD-3-Clause
"""A group has the Gloo contexts and threads that it uses: counts of both, at each stage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_powersgd as tp
from support import ranks
from support.ddp import make_attached
from support.groups import backend_of_world, compress, world
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, gradient

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, inner="gloo")


class _Contexts:
    """Counts the Gloo contexts that this package makes from Python, from now on."""

    def __init__(self) -> None:
        self.timeouts: list[timedelta] = []
        make = dist.ProcessGroupGloo

        def record(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
            self.timeouts.append(timeout)
            return make(store, rank, size, timeout=timeout)

        dist.ProcessGroupGloo = record  # type: ignore[assignment,misc]

    def __call__(self) -> int:
        """The number of contexts since the last call."""
        count = len(self.timeouts)
        self.timeouts.clear()
        return count


def _has_engine() -> bool:
    """Whether a thread of an engine runs."""
    names = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    return any(name.read_text().strip() in ("powersgd", "powersgd_wait") for name in names)


def _compress(rank: int, group: dist.ProcessGroup | None = None) -> None:
    compress(gradient([64, 64], rank), group=group)


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("cpu:gloo,cuda:powersgd", 1), ("cpu:powersgd,cuda:gloo", 1), ("powersgd", 2)],
)
@on_ranks(backend=None)
def test_a_backend_wraps_one_of_each_device_that_it_serves(
    rank: int, backend: str, expected: int
) -> None:
    contexts = _Contexts()
    torch.cuda.is_available = lambda: True
    ranks.init_group(backend, OPTIONS)
    dist.all_reduce(torch.ones(3))
    assert not _has_engine()
    assert contexts() == expected


@on_ranks(backend=None)
def test_an_engine_connects_at_the_first_compressed_step(rank: int) -> None:
    contexts = _Contexts()
    ranks.init_group("cpu:powersgd", OPTIONS, op_timeout=61)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    tp.stats()
    world().set_timeout(timedelta(seconds=62))
    assert (contexts(), _has_engine()) == (1, False)
    _compress(rank)
    assert contexts.timeouts == [timedelta(seconds=62)], "that of the group"
    assert (contexts(), _has_engine()) == (1, True)
    _compress(rank)
    tp.stats()
    assert (contexts(), _has_engine()) == (0, True)


@on_ranks(backend=None)
def test_an_engine_connects_in_attach(rank: int) -> None:
    contexts = _Contexts()
    ranks.init_group("cpu:powersgd")
    make_attached(SHAPES, tp.Options.hook_defaults())
    while len(contexts.timeouts) < 2:  # attach does not wait for it
        time.sleep(0.01)
    assert _has_engine()


def _new_group(members: list[int]) -> Any:
    return dist.new_group(members, backend="cpu:powersgd", pg_options=OPTIONS)


def _split_group(members: list[int]) -> Any:
    return world().split_group(members, timedelta(seconds=21), group_name=f"{members}")


def _mesh(members: list[int]) -> dist.ProcessGroup:
    override: Any = {"rows": ("cpu:powersgd", OPTIONS), "cols": ("cpu:powersgd", OPTIONS)}
    mesh = init_device_mesh(
        "cpu", (2, 2), mesh_dim_names=("rows", "cols"), backend_override=override
    )
    return mesh.get_group("cols")


@pytest.mark.parametrize(
    ("make", "inner"),
    # The inner backend of a split group comes from the one that is split. A mesh has two groups.
    [(_new_group, 1), (_split_group, 0), (_mesh, 2)],
)
@on_ranks(4, options=OPTIONS)
def test_a_group_of_some_ranks(rank: int, make: Callable[[list[int]], Any], inner: int) -> None:
    contexts = _Contexts()
    halves = [[0, 1], [2, 3]]
    mine = halves[rank // 2]
    if make is _new_group:
        group = next(g for g in map(make, halves) if isinstance(g, dist.ProcessGroup))
    else:
        group = make(mine)
    dist.all_reduce(count := torch.ones(1, dtype=torch.int64), group=group)
    assert count.item() == 2
    assert (contexts(), _has_engine()) == (inner, False)
    _compress(rank, group)
    if make is _split_group:
        assert contexts.timeouts == [timedelta(seconds=21)]
    assert (contexts(), _has_engine()) == (1, True)
    assert tp.stats(group)["compressed_calls"] == 1
    assert tp.stats()["compressed_calls"] == 0


@on_ranks(backend=None)
def test_an_abort_while_the_other_rank_does_not_come(rank: int) -> None:
    ranks.init_group("cpu:powersgd", OPTIONS, op_timeout=1)
    if rank == 0:
        work = compress(gradient([64, 64], rank), async_op=True)
        backend_of_world().abort()
        with pytest.raises(RuntimeError, match="could not connect|shut down or aborted"):
            work.wait()
        with pytest.raises(RuntimeError, match="shut down or aborted"):
            _compress(rank)
        ranks.side_store().set("ended", "")
    ranks.side_store().get("ended")
