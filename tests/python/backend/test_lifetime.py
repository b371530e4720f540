# SPDX-License-Identifier: BSD-3-Clause
"""The end of a process group while its process goes on: by shutdown, abort, garbage collection."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

import torch_powersgd as tp
from support import ranks
from support.ddp import make_attached, make_compressed, make_ddp, step
from support.deadline import OPERATION, UNLIMITED
from support.groups import backend_of_world, compress, exception_of, world
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, gradient, gradients
from torch_powersgd._backend import create

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0)


def _threads_and_files() -> tuple[int, int]:
    """The counts of this process's threads and files, without the threads kept for callbacks."""
    gc.collect()
    gc.freeze()  # the next collection need not walk the many objects of now
    names = [Path(f"/proc/self/task/{task}/comm") for task in os.listdir("/proc/self/task")]
    threads = [name for name in names if name.read_text().strip() != "powersgd-then"]
    return len(threads), len(os.listdir("/proc/self/fd"))


def _start(rank: int) -> dist.Work:
    work: dist.Work = compress(gradient([64, 64], rank), async_op=True)
    return work


def _allreduce(group: Any, rank: int) -> Any:
    with tp.scope("always"):
        return group.allreduce([gradient([64, 64], rank)])


def _abort() -> None:
    dist.distributed_c10d._abort_process_group()


def _shut_down() -> None:
    world().shutdown()


@pytest.mark.parametrize("end", [dist.destroy_process_group, _shut_down, _abort])
@on_ranks(options=OPTIONS)
def test_what_is_left_of_a_group_that_has_ended(rank: int, end: Callable[[], None]) -> None:
    group, fresh, (ddp, compression) = world(), make_ddp(SHAPES), make_compressed(SHAPES)
    step(ddp, gradients(SHAPES, rank, 0))
    dist.barrier()
    end()
    uses: list[Callable[[], object]] = [
        lambda: _allreduce(group, rank).wait(),
        lambda: step(ddp, gradients(SHAPES, rank, 1)),
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="shut down or aborted"):
            use()
    for call in (
        lambda: tp.attach(fresh),
        lambda: tp.attach(ddp),
        compression.state_dict,
        compression.detach,
    ):
        with pytest.raises(ValueError, match="group of this module was destroyed or aborted"):
            call()
    # What needs no other process goes on.
    assert tp.stats(group)["compressed_calls"] == compression.stats()["compressed_calls"] == 1
    assert compression.state_dict(per_rank=True)
    (group.abort if end is _abort else group.shutdown)()  # once more


@on_ranks(options=OPTIONS)
def test_a_destruction_lets_works_end_that_the_peer_answers(rank: int) -> None:
    tensors = [gradient([64, 64], "same") for _ in range(30)]
    works = [compress(tensor, async_op=True) for tensor in tensors]
    callbacks = [work.get_future().then(lambda done: done.value()[0]) for work in works]
    dist.destroy_process_group()
    for tensor, work, callback in zip(tensors, works, callbacks, strict=True):
        assert work.wait()
        assert callback.wait().equal(tensor)
        assert not tensor.equal(gradient([64, 64], "same"))


# A shutdown waits for 10 s.
@pytest.mark.parametrize(
    "end", [_abort, pytest.param(dist.destroy_process_group, marks=pytest.mark.long)]
)
@on_ranks(options=OPTIONS, op_timeout=UNLIMITED)
def test_works_that_the_peer_never_answers(rank: int, end: Callable[[], None]) -> None:
    store = ranks.side_store()
    _start(rank).wait()
    if rank == 1:
        store.wait(["rank 0 has ended its group"])
        return
    works = [_start(rank) for _ in range(4)]
    end()
    # The first is on the wire, where only Gloo's time-out ends it; the others never began.
    for work in works[1:]:
        assert work.is_completed()
        assert not work.is_success()
        assert "aborted" in str(exception_of(work, "aborted"))
        chained = work.get_future().then(lambda done: done.value())
        for ask in (work.wait, work.result, work.get_future().wait, chained.wait):
            with pytest.raises(RuntimeError, match="shut down or aborted"):
                ask()
    store.set("rank 0 has ended its group", "1")


@on_ranks(backend=None)
def test_a_thread_aborts_while_others_end_and_use_the_group(rank: int) -> None:
    store = ranks.side_store()
    for end in [dist.destroy_process_group, _shut_down, _abort]:
        ranks.init_group("cpu:powersgd", OPTIONS)
        ddp, compression = make_compressed(SHAPES)
        step(ddp, gradients(SHAPES, rank, 0))
        ended = f"rank 0 has ended its group by {end.__name__}"
        if rank == 1:
            store.wait([ended])
        else:
            _end_while_threads_use_the_group(compression, end)
            store.set(ended, "1")
        if dist.is_initialized():
            dist.destroy_process_group()


def _end_while_threads_use_the_group(compression: tp.Compression, end: Callable[[], None]) -> None:
    works = [_start(0) for _ in range(3)]  # the peer never answers
    abort, stats = world().abort, backend_of_world().stats

    def abort_during_the_end() -> None:
        time.sleep(0.2)
        abort()

    with ThreadPoolExecutor() as threads:
        aborted = threads.submit(abort_during_the_end)
        waits, *reads = [threads.submit(use) for use in (works[1].wait, stats, compression.stats)]
        end()
        aborted.result()
        with pytest.raises(RuntimeError, match="shut down or aborted"):
            waits.result()
        for read in reads:
            read.result()
    with pytest.raises(RuntimeError, match="shut down or aborted"):
        works[2].get_future().wait()


def _destroyed_group(rank: int, number: int) -> None:
    group = dist.new_group(backend="cpu:powersgd", pg_options=OPTIONS)
    work = compress(gradient([64, 64], rank), group=group, async_op=True)
    work.get_future().then(lambda done: done.value()).wait()
    dist.barrier(group)
    dist.destroy_process_group(group)


def _aborted_default_group(rank: int, number: int) -> None:
    ranks.init_group("cpu:powersgd", OPTIONS)
    _start(rank).wait()
    assert tp.stats()["compressed_calls"] == 1
    dist.barrier()
    _abort()


def _lost_backend(rank: int, number: int) -> None:
    """A backend without a group: torch's tables keep a group alive that is not destroyed.

    It goes idle or with works in flight.
    """
    options = _DistributedBackendOptions()
    options.store = dist.PrefixStore(f"backend {number}", ranks.side_store())
    options.group_rank, options.group_size = rank, 2
    options.timeout = timedelta(seconds=OPERATION)
    backend: Any = create(options, OPTIONS)
    _allreduce(backend, rank).get_future().then(lambda done: None).wait()
    works = [_allreduce(backend, rank) for _ in range(10 * (number % 2))]
    del backend
    for work in works:
        work.wait()


@pytest.mark.parametrize(
    ("make_and_lose", "backend"),
    [
        (_destroyed_group, "cpu:powersgd"),
        (_aborted_default_group, None),
        (_lost_backend, "cpu:powersgd"),
    ],
)
def test_a_group_that_is_gone_leaves_nothing(
    make_and_lose: Callable[[int, int], None], backend: str | None
) -> None:
    ranks.run(2, _leaves_nothing, make_and_lose, backend=backend)


def _leaves_nothing(rank: int, make_and_lose: Callable[[int, int], None]) -> None:
    store, counts = ranks.side_store(), []
    for number in range(6):
        make_and_lose(rank, number)
        store.set(f"{number} of rank {rank}", "1")
        store.wait([f"{number} of rank {1 - rank}"])
        counts.append(_threads_and_files())
    # The first backend makes threads that later ones use. Gloo may still close its last connection.
    assert max(counts[2:]) <= max(counts[:2]), counts


@on_ranks()
def test_a_model_that_outlives_its_group(rank: int) -> None:
    ddp = make_attached(SHAPES)
    if rank == 1:
        time.sleep(1)
    # The inner backend runs this exact call. Its thread stays in it until the other rank comes. It
    # then needs the GIL to drop the tensor, whose last reference it has.
    dist.all_reduce(gradient([4], rank), async_op=rank == 0)
    dist.destroy_process_group()
    del ddp  # torch's reducer, which holds the GIL meanwhile, has the last reference to the group


@on_ranks(options=OPTIONS)
def test_a_destruction_while_a_callback_runs(rank: int) -> None:
    future = _start(rank).get_future().then(lambda done: time.sleep(0.5))
    dist.destroy_process_group()
    future.wait()


@pytest.mark.long
@on_ranks(options=OPTIONS)
def test_steps_leave_no_memory(rank: int) -> None:
    ddp, _ = make_compressed(SHAPES)
    mine = gradients(SHAPES, rank, 0)
    held = []
    for _ in range(2):
        for _ in range(500):
            step(ddp, mine)
        held.append(_private_memory())
    assert held[1] - held[0] < 500 * 500, held  # less than 500 bytes in a step


def _private_memory() -> int:
    """The bytes of this process's private memory, without those that malloc keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])
