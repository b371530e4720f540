# SPDX-License-Identifier: BSD-3-Clause
"""The Work of a compressed all-reduce, its future, and the calls that may run beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.deadline import UNLIMITED
from support.groups import compress, exception_of
from support.on_ranks import on_ranks
from support.synthetic import gradient

# Nothing of an earlier call changes the result of a later one. The second column finds what a start
# that is almost orthogonal to the matrix has missed.
OPTIONS = tp.Options.hook_defaults(
    matrix_approximation_rank=2, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False
)


def _rank_one(rank: int, key: object, rows: int = 48, cols: int = 40) -> torch.Tensor:
    """A matrix of rank 1, whose sum over ranks is of rank 1 too, so it survives compression."""
    left, right = gradient([rows, 1], key, "left"), gradient([1, cols], key, "right")
    return (rank + 1) * left * right


def _check_sum(tensor: torch.Tensor, key: object) -> None:
    expected = 3 * _rank_one(0, key, *tensor.shape)
    torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def _start(rank: int, key: object, **shape: int) -> tuple[torch.Tensor, dist.Work]:
    tensor = _rank_one(rank, key, **shape)
    return tensor, compress(tensor, async_op=True)


def _check_all_compressed(calls: int) -> None:
    assert tp.stats()["compressed_calls"] == calls


@contextmanager
def _early(rank: int, key: object, late: int) -> Iterator[None]:
    """Runs the body on the other rank before rank `late` enters.

    The other rank's works cannot be complete before that. Their callbacks cannot run at once.
    """
    store = ranks.side_store()
    if rank == late:
        store.wait([f"{key}"])
    yield
    if rank != late:
        store.set(f"{key}", "1")


@on_ranks(options=OPTIONS)
def test_a_work_is_complete_after_its_wait(rank: int) -> None:
    tensor, work = _start(rank, 0)
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert exception_of(work, None) is None
    (result,) = work.result()
    assert result.data_ptr() == tensor.data_ptr()
    _check_sum(tensor, 0)
    assert work.wait() is True, "waiting again is harmless"
    _check_all_compressed(1)


@on_ranks(options=OPTIONS)
def test_a_future_holds_the_tensor_and_can_be_chained(rank: int) -> None:
    tensor, work = _start(rank, 0)
    future = work.get_future()
    (value,) = future.wait()
    assert future.done()
    assert value.data_ptr() == tensor.data_ptr()
    _check_sum(value, 0)
    for late in range(2):
        with _early(rank, late, late):
            _, work = _start(rank, late)
            chain = work.get_future().then(lambda done: done.value()[0] * 2)
            chain = chain.then(lambda done: done.value() / 2)
        _check_sum(chain.wait(), late)
        assert work.is_completed()


@on_ranks(options=OPTIONS, op_timeout=UNLIMITED)
def test_a_work_is_not_complete_before_the_peer_calls(rank: int) -> None:
    with _early(rank, 0, late=1):
        tensor, work = _start(rank, 0)
        if rank == 0:
            assert not work.is_completed()
            assert not work.get_future().done()
            started = time.monotonic()
            with pytest.raises(RuntimeError, match="(?i)time"):
                work.wait(timedelta(milliseconds=100))
            assert time.monotonic() - started > 0.05
    work.wait()
    _check_sum(tensor, 0)


@on_ranks(options=OPTIONS)
def test_a_callback_that_raises_fails_its_own_future(rank: int) -> None:
    _, work = _start(rank, 0)

    def fail(done: torch.futures.Future[Any]) -> None:
        raise ZeroDivisionError("in a callback")

    with pytest.raises(RuntimeError, match="in a callback"):
        work.get_future().then(fail).wait()
    tensor, work = _start(rank, 1)
    work.wait()
    _check_sum(tensor, 1)


def _nested_callbacks(rank: int) -> None:
    """Each callback starts the next work and waits for its callback."""

    def descend(depth: int) -> torch.Tensor:
        with _early(rank, depth, late=depth % 2):
            tensor, work = _start(rank, depth)
            if depth < 8:
                deeper = work.get_future().then(lambda _: descend(depth + 1))
        if depth < 8:
            return deeper.wait()
        work.wait()
        return tensor

    _check_sum(descend(0), 8)
    _check_all_compressed(9)


def _callbacks_that_wait_for_later_works(rank: int) -> None:
    """Each callback waits for the next work: all of them wait at the same time for the last."""
    for late in range(2):
        futures = []
        with _early(rank, late, late):
            works = [_start(rank, (late, i))[1] for i in range(12)]
            for work, later in zip(works[:-1], works[1:], strict=True):
                waits = partial(lambda later, _: later.wait()[0], later.get_future())
                futures.append(work.get_future().then(waits))
        for i, future in enumerate(futures):
            _check_sum(future.wait(), (late, i + 1))


@pytest.mark.parametrize("callbacks", [_nested_callbacks, _callbacks_that_wait_for_later_works])
@on_ranks(options=OPTIONS)
def test_callbacks_wait_without_a_deadlock(rank: int, callbacks: Callable[[int], None]) -> None:
    torch.set_num_interop_threads(1)  # Callbacks that share a thread would block each other.
    callbacks(rank)


@on_ranks(options=OPTIONS)
def test_works_are_awaited_in_any_order_and_keep_their_tensors(rank: int) -> None:
    works = [_start(rank, i, rows=20 + 7 * i)[1] for i in range(40)]
    for i in torch.randperm(40, generator=torch.Generator().manual_seed(rank)).tolist():
        works[i].wait()
        _check_sum(works[i].result()[0], i)
    _check_all_compressed(40)


@on_ranks(options=OPTIONS)
def test_tensors_of_inference_leaves_and_views(rank: int) -> None:
    with torch.inference_mode():
        compress(of_inference := _rank_one(rank, 0))
    _check_sum(of_inference, 0)
    compress(leaf := _rank_one(rank, 1).requires_grad_())
    _check_sum(leaf.detach(), 1)
    stacked = torch.stack([_rank_one(rank, k) for k in range(3)])
    compress(stacked[1])
    _check_sum(stacked[1], 1)
    for k in (0, 2):
        assert stacked[k].equal(_rank_one(rank, k)), "what is beside a view"
    _check_all_compressed(3)


@on_ranks(options=OPTIONS)
def test_exact_collectives_beside_works_in_flight(rank: int) -> None:
    """The main thread and the worker exchange data at the same time. One Gloo context would mix
    them.
    """
    peer = 1 - rank
    for i in range(60):
        started = [_start(rank, (i, k), rows=16 + 8 * k) for k in range(3)]
        dist.all_reduce(counts := torch.full([33], rank + i))
        gathered = [torch.empty(5), torch.empty(5)]
        dist.all_gather(gathered, torch.full([5], 10.0 * i + rank))
        received = torch.empty(7)
        sending: Any = dist.isend(torch.full([7], float(rank)), peer)
        dist.recv(received, peer)
        sending.wait()
        dist.broadcast(root := torch.tensor([i if rank == 0 else -1]), 0)
        assert counts.tolist() == [2 * i + 1] * 33
        assert [part.tolist() for part in gathered] == [[10.0 * i] * 5, [10.0 * i + 1] * 5]
        assert received.tolist() == [float(peer)] * 7
        assert root.item() == i
        for k, (tensor, work) in enumerate(started):
            work.wait()
            _check_sum(tensor, (i, k))
    _check_all_compressed(180)


@on_ranks(options=OPTIONS)
def test_works_of_two_groups_are_awaited_in_opposite_orders(rank: int) -> None:
    groups = [dist.group.WORLD, dist.new_group(backend="cpu:powersgd", pg_options=OPTIONS)]
    for i in range(30):
        tensors = [_rank_one(rank, (i, k)) for k in range(2)]
        works = [
            compress(tensor, group=group, async_op=True)
            for tensor, group in zip(tensors, groups, strict=True)
        ]
        for k in (0, 1) if rank == 0 else (1, 0):
            works[k].wait()
            _check_sum(tensors[k], (i, k))
