# SPDX-License-Identifier: BSD-3-Clause
"""Training on a GPU: the bodies of the tests on the CPU run there."""

from __future__ import annotations

import pytest
import test_check_every
import test_loss_scale
import test_wire
import torch

import torch_powersgd as tp
from support.cuda_ranks import INNERS, needs_cuda, options_of, run
from support.synthetic import (
    SHAPES,
    gradients,
    make_compressed,
    own_part,
    step,
)

pytestmark = needs_cuda

TOLERANCE = 1e-5  # float32, as on the CPU


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("case", ["none", "one", "twice"])
def test_a_scaler_that_skips_loses_nothing_of_the_other_buckets(inner: str, case: str) -> None:
    bad = test_loss_scale.BAD[case]
    for errors, scales, _ in run(
        test_loss_scale.with_scaler, bad, True, "cuda", options=options_of(inner)
    ):
        assert len(set(scales)) >= 3
        assert max(errors.values()) < TOLERANCE, errors


def _no_synchronization(rank: int) -> tuple[bool, bool]:
    """Takes a skipped step back on the device, by a found_inf that the host has not read."""
    ddp, compression = make_compressed(SHAPES, options_of(), device="cuda")
    model = compression._reducer.states
    for i in range(2):
        mine = {name: g.cuda() for name, g in gradients(SHAPES, rank, i).items()}
        step(ddp, mine)
        model.step_skipped(torch.zeros((), device="cuda"))
    before = _sent(compression)
    torch.cuda.synchronize()
    found_inf = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    model.step_skipped(found_inf)
    torch.cuda.set_sync_debug_mode("default")
    after = _sent(compression)
    return all(q.any() for q in before), any(q.any() for q in after)


def _sent(compression: tp.Compression) -> list[torch.Tensor]:
    """The factors that this rank has sent of each parameter in its last step."""
    state = own_part(compression.state_dict(per_rank=True))
    return [entry["q_local"] for entry in state["parameters"].values()]


def test_a_skipped_step_is_taken_back_without_the_host() -> None:
    assert run(_no_synchronization) == [(True, False)] * 2


def _scale_is_not_read(rank: int) -> tuple[bool, float]:
    """Reduces gradients of a changing scale. The host may wait only in the scaler's own step."""
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=1)
    ddp, compression = make_compressed(SHAPES, options_of(), scaler=scaler, device="cuda")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for i in range(6):
        loss = ddp({name: g.cuda() for name, g in gradients(SHAPES, rank, i).items()})
        torch.cuda.set_sync_debug_mode("error" if i >= 3 else "default")
        scaler.scale(loss).backward()
        torch.cuda.set_sync_debug_mode("default")
        scaler.step(optimizer)
        scaler.update()
    finite = all(p.grad.isfinite().all() for p in ddp.parameters() if p.grad is not None)
    return finite, compression.grad_scale


def test_a_changing_scale_is_followed_without_the_host() -> None:
    assert run(_scale_is_not_read) == [(True, 2.0**14)] * 2


@pytest.mark.parametrize("inner", INNERS)
def test_a_difference_is_found_mended_and_counted(inner: str) -> None:
    options = options_of(inner, check_every=3, min_numel=500)
    results = run(test_check_every.unused, 2, 1, "cuda", options=options)
    for lines, seen, replicas, errors in results:
        assert seen[-1] == 1
        assert len(lines) == 1
        assert replicas == results[0][2]
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("wire", test_wire.WIRES, ids=str)
def test_what_a_rank_rounds_off_is_part_of_its_residual(inner: str, wire: test_wire.Wire) -> None:
    for errors, stats, _ in run(
        test_wire.identity, wire, 2, 1.0, SHAPES, "cuda", options=options_of(inner)
    ):
        assert stats["skipped_steps"] == 0
        assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("inner", INNERS)
def test_four_ranks_exchange_two_shot(inner: str) -> None:
    """Two ranks gather. Here NCCL's all_to_all runs."""
    shapes = test_wire.WITH_LARGE
    results = run(
        *(test_wire.identity, "int8", 4, 1.0, shapes, "cuda"),
        options=options_of(inner),
        world_size=4,
    )
    for errors, stats, outputs in results:
        assert stats["skipped_steps"] == 0
        assert max(errors.values()) < TOLERANCE, errors
        for one, other in zip(outputs, results[0][2], strict=True):
            assert all((one[name] == other[name]).all() for name in one)
