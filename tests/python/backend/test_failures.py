# SPDX-License-Identifier: BSD-3-Clause
"""A stage that fails, a peer that dies or never calls: an error everywhere, and never a hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.call_observer import exception_of
from support.deadline import UNLIMITED
from support.groups import world
from support.on_ranks import on_ranks
from support.synthetic import (
    SHAPES,
    Ledger,
    gradient,
    gradients,
    make_attached,
    make_compressed,
    mean_gradients,
    residuals_of,
    step,
)
from torch_powersgd.group_backends import find_backends

STAGES = ("project", "reduce_p", "orthogonalize", "back_project", "reduce_q", "reconstruct")
OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=0, matrix_approximation_rank=2, min_numel=4096
)
ALWAYS = tp.Options.hook_defaults(scope="always", start_powerSGD_iter=0)

# A rollback recomputes the residual as M - G: one rounding of M in float32.
ROLLBACK_TOLERANCE = 1e-6


@contextmanager
def _failing_at(stage: str) -> Iterator[None]:
    backend = find_backends(None)[0]
    backend._fail_at(stage)
    yield
    backend._fail_at("")


def _raises_failure_in(stage: str) -> Any:
    return pytest.raises(RuntimeError, match=f"injected failure in {stage}")


@on_ranks(options=OPTIONS)
def test_ddp_goes_on_after_a_failure_in_each_stage(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, bucket_cap_mb=0.002)  # several buckets
    ledger = Ledger()

    def deliver(i: int) -> None:
        ledger.add(step(ddp, gradients(SHAPES, rank, i)), mean_gradients(SHAPES, 2, i))

    for i in range(3):  # DDP rebuilds its buckets meanwhile
        deliver(i)
    for i, stage in enumerate(STAGES):
        before = compression.stats()["residual_norms"]
        with _failing_at(stage), _raises_failure_in(stage):
            step(ddp, gradients(SHAPES, rank, "never delivered"))
        for name, norm in compression.stats()["residual_norms"].items():
            assert norm == pytest.approx(before[name], rel=ROLLBACK_TOLERANCE, abs=1e-6), name
        deliver(3 + i)
    # The ledger has all of the steps that worked, and nothing of those that failed.
    assert max(ledger.errors(residuals_of(compression)).values()) < 1e-5


@on_ranks(options=ALWAYS)
def test_wait_future_result_and_callback_get_the_failure(rank: int) -> None:
    for stage in STAGES:
        with _failing_at(stage):
            work = dist.all_reduce(gradient([64, 64], rank), async_op=True)
            called: list[Any] = []
            ask: list[Callable[[], object]] = [
                work.wait,
                work.get_future().wait,
                work.result,
                work.get_future()
                .then(lambda done, called=called: called.append(done.value()))
                .wait,
                lambda: dist.all_reduce(gradient([64, 64], rank)),
            ]
            for each in ask:
                with _raises_failure_in(stage):
                    each()
            assert called == []
            assert work.is_completed()
            assert not work.is_success()
            assert stage in str(exception_of(work, stage))
            # Exact collectives do not pass through the stages.
            dist.all_reduce(total := torch.tensor([rank]))
            assert total.item() == 1
        dist.all_reduce(gradient([64, 64], rank))


# Peers.

OP_TIMEOUT = 1  # that of the groups is UNLIMITED, so that this one ends the waits


def _set_timeout(seconds: float) -> None:
    world().set_timeout(timedelta(seconds=seconds))


def _train_until_an_error(rank: int, waits: bool) -> None:
    ddp, store = make_attached(SHAPES), ranks.side_store()

    def train(steps: int) -> None:
        for i in range(steps):
            step(ddp, gradients(SHAPES, rank, i))

    train(3)
    store.set(f"rank {rank} has trained", "1")
    store.wait([f"rank {other} has trained" for other in range(3)])
    _set_timeout(OP_TIMEOUT)
    if rank == 1:
        time.sleep(0.3 * waits)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        train(100)


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
    dist.all_reduce(gradient([64, 64], rank), async_op=True).get_future().wait()


def _timeout_of_one_call(rank: int) -> None:
    call = dist.AllreduceOptions()
    call.timeout = timedelta(seconds=OP_TIMEOUT)
    world().allreduce([gradient([64, 64], rank)], call).wait()


@pytest.mark.parametrize("call", [_wait_for_the_future, _timeout_of_one_call])
@on_ranks(options=ALWAYS, op_timeout=UNLIMITED)
def test_a_rank_that_never_calls_is_a_timeout(rank: int, call: Callable[[int], None]) -> None:
    dist.barrier()
    if rank == 0:
        started = time.monotonic()
        with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
            call(rank)
        assert time.monotonic() - started > 0.5 * OP_TIMEOUT
        ranks.side_store().set("rank 0 has its error", "1")
    ranks.side_store().wait(["rank 0 has its error"])


@on_ranks(options=ALWAYS, op_timeout=UNLIMITED)
def test_a_failure_on_one_rank_is_an_error_on_the_others(rank: int) -> None:
    dist.barrier()
    _set_timeout(OP_TIMEOUT)
    if rank == 0:
        find_backends(None)[0]._fail_at("project")
    expected = "injected failure in project" if rank == 0 else "(?i)timed? ?out|closed"
    with pytest.raises(RuntimeError, match=expected):
        dist.all_reduce(gradient([64, 64], rank))
    ranks.side_store().set(f"rank {rank} has its error", "1")
    ranks.side_store().wait([f"rank {1 - rank} has its error"])
