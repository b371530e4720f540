# SPDX-License-Identifier: BSD-3-Clause
"""A peer that dies or never calls: an error on the others, and never a hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.ddp import make_attached, train
from support.deadline import UNLIMITED
from support.groups import compress, world
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, gradient

OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=0, matrix_approximation_rank=2, min_numel=4096
)

OP_TIMEOUT = 1  # that of the groups is UNLIMITED, so that this one ends the waits


def _set_timeout(seconds: float) -> None:
    world().set_timeout(timedelta(seconds=seconds))


def _train_until_an_error(rank: int, waits: bool) -> None:
    ddp, store = make_attached(SHAPES), ranks.side_store()
    train(ddp, range(3))
    store.set(f"rank {rank} has trained", "1")
    store.wait([f"rank {other} has trained" for other in range(3)])
    _set_timeout(OP_TIMEOUT)
    if rank == 1:
        time.sleep(0.3 * waits)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        train(ddp, range(100))


@pytest.mark.parametrize("waits", [False, True], ids=["at-once", "while-others-wait"])
def test_a_peer_that_dies_is_an_error_on_the_others(waits: bool) -> None:
    first, dead, last = ranks.outcomes(
        3, _train_until_an_error, waits, options=OPTIONS, op_timeout=UNLIMITED
    )
    assert dead.exitcode == -signal.SIGKILL
    for survivor in (first, last):
        assert (survivor.error, survivor.exitcode) == ("", 0)


def _wait_for_the_future(rank: int) -> None:
    _set_timeout(OP_TIMEOUT)
    compress(gradient([64, 64], rank), async_op=True).get_future().wait()


def _timeout_of_one_call(rank: int) -> None:
    call = dist.AllreduceOptions()
    call.timeout = timedelta(seconds=OP_TIMEOUT)
    with tp.scope("always"):
        world().allreduce([gradient([64, 64], rank)], call).wait()


@pytest.mark.parametrize("call", [_wait_for_the_future, _timeout_of_one_call])
@on_ranks(options=OPTIONS, op_timeout=UNLIMITED)
def test_a_rank_that_never_calls_is_a_timeout(rank: int, call: Callable[[int], None]) -> None:
    dist.barrier()
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
            call(rank)
        assert time.monotonic() - started > 0.5 * OP_TIMEOUT
        ranks.side_store().set("rank 0 has its error", "1")
    ranks.side_store().wait(["rank 0 has its error"])
