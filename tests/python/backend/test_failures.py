# SPDX-License-Identifier: BSD-3-Clause
"""A stage that fails, a peer that dies or never calls: an error everywhere, and never a hang."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.call_observer import exception_of
from support.groups import world
from support.synthetic import (
    SHAPES,
    Ledger,
    gradient,
    gradients,
    make_attached,
    make_compressed,
    make_ddp,
    mean_gradients,
    reduce_in_backward,
    relative_error,
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


def _fail_at(stage: str) -> None:
    find_backends(None)[0]._fail_at(stage)


def _norms(compression: tp.Compression) -> dict[str, float]:
    norms: dict[str, float] = compression.stats()["residual_norms"]
    return norms


def _attached_ddp(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, bucket_cap_mb=0.002)  # several buckets
    ledger = Ledger()

    def deliver(i: int) -> None:
        ledger.add(step(ddp, gradients(SHAPES, rank, i)), mean_gradients(SHAPES, 2, i))

    for i in range(3):  # DDP rebuilds its buckets meanwhile
        deliver(i)
    delivered = 3
    for stage in STAGES:
        before = _norms(compression)
        _fail_at(stage)
        with pytest.raises(RuntimeError, match=f"injected failure in {stage}"):
            step(ddp, gradients(SHAPES, rank, 1000 + delivered))
        _fail_at("")
        for name, norm in _norms(compression).items():
            assert norm == pytest.approx(before[name], rel=ROLLBACK_TOLERANCE, abs=1e-6), name
        deliver(delivered)
        deliver(delivered + 1)
        delivered += 2
    # The ledger has all of the steps that worked, and nothing of those that failed.
    assert max(ledger.errors(residuals_of(compression)).values()) < 1e-5


def test_ddp_goes_on_after_a_failure_in_each_stage() -> None:
    ranks.run(2, _attached_ddp, options=OPTIONS)


def _unattached_ddp(rank: int) -> None:
    ddp = make_ddp(SHAPES)
    for _ in range(3):  # compressed from the third on
        before = step(ddp, gradients(SHAPES, rank, 0))
    for stage in STAGES:
        _fail_at(stage)
        with pytest.raises(RuntimeError, match=f"injected failure in {stage}"):
            step(ddp, gradients(SHAPES, rank, 0))
        _fail_at("")
        after = step(ddp, gradients(SHAPES, rank, 0))
        assert after.keys() == before.keys()
        assert all(torch.isfinite(tensor).all() for tensor in after.values())
    # Nothing had been sent yet when the stage project failed.
    assert tp.stats()["compressed_calls"] == 1 + 2 * len(STAGES) - 1


def test_unattached_ddp_goes_on_after_a_failure_in_each_stage() -> None:
    ranks.run(2, _unattached_ddp, options=dataclasses.replace(OPTIONS, min_numel=1024))


def _flat_outputs(rank: int, failing: str | None) -> list[torch.Tensor]:
    outputs = []
    for i in range(4):
        if i == 2 and failing is not None:
            _fail_at(failing)
            with pytest.raises(RuntimeError, match=f"injected failure in {failing}"):
                reduce_in_backward([gradient([5000], "never delivered", rank)])
            _fail_at("")
        outputs += reduce_in_backward([gradient([5000], rank, i)])
    return outputs


def _flat(rank: int) -> None:
    expected = _flat_outputs(rank, None)
    for stage in STAGES:
        dist.destroy_process_group()
        ranks.init_group("cpu:powersgd", OPTIONS)
        for got, wanted in zip(_flat_outputs(rank, stage), expected, strict=True):
            assert relative_error(got, wanted) < 1e-5, stage


def test_a_flat_tensor_goes_on_as_if_the_failed_step_had_not_been() -> None:
    ranks.run(2, _flat, options=OPTIONS)


def _reaches(rank: int) -> None:
    for stage in STAGES:
        _fail_at(stage)
        tensor = gradient([64, 64], rank)
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(RuntimeError, match=f"injected failure in {stage}"):
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert stage in str(exception_of(work, stage))
        with pytest.raises(RuntimeError, match=f"injected failure in {stage}"):
            work.get_future().wait()
        with pytest.raises(RuntimeError, match=f"injected failure in {stage}"):
            work.result()
        called: list[Any] = []
        chained = work.get_future().then(lambda done, called=called: called.append(done.value()))
        with pytest.raises(RuntimeError, match=f"injected failure in {stage}"):
            chained.wait()
        assert called == []
        with pytest.raises(RuntimeError, match=f"injected failure in {stage}"):
            dist.all_reduce(gradient([64, 64], rank))
        # Exact collectives do not pass through the stages.
        dist.all_reduce(total := torch.tensor([rank]))
        assert total.item() == 1
        _fail_at("")
        dist.all_reduce(gradient([64, 64], rank))


def test_wait_future_result_and_callback_get_the_failure() -> None:
    ranks.run(2, _reaches, options=ALWAYS)


# Peers.

OP_TIMEOUT = 1
SLACK = 8  # seconds that a busy machine may take besides


def _set_timeout(seconds: float) -> None:
    world().set_timeout(timedelta(seconds=seconds))


def _train_until_an_error(rank: int, ending: str) -> float:
    """The seconds from the death of rank 1 to the error on this rank."""
    ddp = make_attached(SHAPES)
    _set_timeout(OP_TIMEOUT)

    def train(steps: int) -> None:
        for i in range(steps):
            step(ddp, gradients(SHAPES, rank, i))

    train(3)
    if rank == 1:
        if ending == "while others wait":
            time.sleep(0.3)
        if ending == "os._exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        train(100)
    return time.monotonic() - started


@pytest.mark.parametrize("ending", ["os._exit", "SIGKILL", "while others wait"])
def test_a_peer_that_dies_is_an_error_on_the_others(ending: str) -> None:
    first, dead, last = ranks.outcomes(
        3, _train_until_an_error, ending, options=OPTIONS, timeout=40
    )
    assert dead.exitcode == (7 if ending == "os._exit" else -signal.SIGKILL)
    for survivor in (first, last):
        assert survivor.error == ""
        assert survivor.exitcode == 0
        assert survivor.value < OP_TIMEOUT + SLACK


def _never_called_by_rank_1(rank: int, asynchronous: bool) -> float:
    store = ranks.side_store()
    dist.barrier()
    _set_timeout(OP_TIMEOUT)
    if rank == 1:
        store.wait(["rank 0 has its error"])
        return 0.0
    started = time.monotonic()
    if asynchronous:
        future = dist.all_reduce(gradient([64, 64], rank), async_op=True).get_future()
        with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
            future.wait()
    else:
        with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
            dist.all_reduce(gradient([64, 64], rank))
    elapsed = time.monotonic() - started
    store.set("rank 0 has its error", "1")
    return elapsed


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_never_calls_is_a_timeout(asynchronous: bool) -> None:
    elapsed, _ = ranks.run(2, _never_called_by_rank_1, asynchronous, options=ALWAYS, timeout=40)
    assert 0.5 * OP_TIMEOUT < elapsed < OP_TIMEOUT + SLACK


def _timeout_of_one_call(rank: int) -> float:
    store = ranks.side_store()
    if rank == 1:
        store.wait(["rank 0 has its error"])
        return 0.0
    call = dist.AllreduceOptions()
    call.timeout = timedelta(seconds=OP_TIMEOUT)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
        world().allreduce([gradient([64, 64], rank)], call).wait()
    elapsed = time.monotonic() - started
    store.set("rank 0 has its error", "1")
    return elapsed


def test_the_timeout_of_one_call() -> None:
    elapsed, _ = ranks.run(2, _timeout_of_one_call, options=ALWAYS, op_timeout=60, timeout=40)
    assert 0.5 * OP_TIMEOUT < elapsed < OP_TIMEOUT + SLACK


def _fails_on_rank_0_alone(rank: int, stage: str) -> None:
    dist.barrier()
    _set_timeout(OP_TIMEOUT)
    if rank == 0:
        _fail_at(stage)
    expected = f"injected failure in {stage}" if rank == 0 else "(?i)timed? ?out|closed"
    with pytest.raises(RuntimeError, match=expected):
        dist.all_reduce(gradient([64, 64], rank))
    if rank == 0:  # stay until the other has its error
        ranks.side_store().wait(["rank 1 has its error"])
    else:
        ranks.side_store().set("rank 1 has its error", "1")


@pytest.mark.parametrize("stage", ["project", "back_project"])
def test_a_failure_on_one_rank_is_an_error_on_the_others(stage: str) -> None:
    ranks.run(2, _fails_on_rank_0_alone, stage, options=ALWAYS, timeout=40)
