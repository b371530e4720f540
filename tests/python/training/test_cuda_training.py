# SPDX-License-Identifier: BSD-3-Clause
"""Training on a GPU: the bodies of the tests on the CPU run there."""

from __future__ import annotations

from typing import Any

import pytest
import test_check_every
import test_checkpoint
import test_grad_scaler
import test_identity
import test_nonfinite
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support.cuda_ranks import INNERS, needs_cuda, options_of, run
from support.ddp import make_compressed, train
from support.on_ranks import models_agree
from support.states import own_part
from support.synthetic import SHAPES, gradient, gradients

pytestmark = needs_cuda

# Compressed at matrix rank 40, where torch does the products.
LARGE = {"conv": (100, 7, 10, 10), "bias": (16,)}


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize("case", ["none", "one", "twice"])
def test_a_scaler_that_skips_loses_nothing_of_the_other_buckets(inner: str, case: str) -> None:
    bad = test_grad_scaler.BAD[case]
    run(test_grad_scaler.with_scaler, bad, True, (), "cuda", options=options_of(inner))


def _sent(compression: tp.Compression) -> list[torch.Tensor]:
    """The factors that this rank has sent of each parameter in its last step."""
    state = own_part(compression.state_dict(per_rank=True))
    return [entry["q_local"] for entry in state["parameters"].values()]


def _taken_back(rank: int) -> None:
    """Takes a skipped step back on the device, by a found_inf that the host has not read."""
    ddp, compression = make_compressed(SHAPES, options_of(), device="cuda")
    model = compression._reducer.states
    for i in range(2):
        train(ddp, [i])
        model.step_skipped(torch.zeros((), device="cuda"))
    assert all(q.any() for q in _sent(compression))
    torch.cuda.synchronize()
    found_inf = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    model.step_skipped(found_inf)
    torch.cuda.set_sync_debug_mode("default")
    assert not any(q.any() for q in _sent(compression))


def test_a_skipped_step_is_taken_back_without_the_host() -> None:
    run(_taken_back)


def _scale_is_not_read(rank: int) -> None:
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
    assert all(p.grad.isfinite().all() for p in ddp.parameters() if p.grad is not None)
    assert compression.grad_scale == 2.0**14


def test_a_changing_scale_is_followed_without_the_host() -> None:
    run(_scale_is_not_read)


@pytest.mark.parametrize("inner", INNERS)
def test_a_difference_is_found_mended_and_counted(inner: str) -> None:
    options = options_of(inner, check_every=3, min_numel=500)
    run(test_check_every.damaged, 1, "1", "cuda", options=options)


@pytest.mark.parametrize("inner", INNERS)
@pytest.mark.parametrize(
    ("wire", "world_size"), [*((wire, 2) for wire in test_identity.WIRES), ("int8", 4)]
)
def test_a_wire_that_rounds_loses_nothing(inner: str, wire: str, world_size: int) -> None:
    """Two ranks gather. With four, NCCL's all_to_all runs."""
    run(
        *(test_identity.identity, options_of(wire_dtype=wire), 1.0, 1.0, "cuda"),
        options=options_of(inner),
        world_size=world_size,
    )


@pytest.mark.parametrize(
    ("inner", "rank", "dtype", "world_size"),
    [
        ("auto", 1, torch.float32, 2),
        ("auto", 3, torch.bfloat16, 2),
        ("auto", 2, torch.float32, 4),
        ("auto", 40, torch.float32, 2),
        ("auto", 40, torch.bfloat16, 2),
        ("gloo", 2, torch.float32, 2),
    ],
    ids=str,
)
def test_attached_adds_up_and_replicas_are_equal(
    inner: str, rank: int, dtype: torch.dtype, world_size: int
) -> None:
    options = options_of(inner, matrix_approximation_rank=rank)
    shapes = LARGE if rank > 32 else SHAPES
    arguments = (options, 1.0, 1.0, "cuda", dtype, shapes)
    run(test_identity.identity, *arguments, options=options, world_size=world_size)


@pytest.mark.parametrize("inner", INNERS)
def test_flat_delivers_everything(inner: str) -> None:
    options = options_of(inner, matrix_approximation_rank=4, min_numel=500)
    run(test_identity.deliver_flat, dist.ReduceOp.SUM, "cuda", options=options)


@pytest.mark.parametrize("inner", INNERS)
def test_a_gradient_that_is_not_finite_costs_one_step(inner: str) -> None:
    arguments = ("nan in a matrix", "cuda")
    run(test_nonfinite.attached_goes_on, *arguments, options=options_of(inner))


@pytest.mark.parametrize("inner", INNERS)
def test_a_state_is_equal_on_all_ranks_and_loads(inner: str) -> None:
    arguments: Any = (test_checkpoint.OPTIONS, "cuda")
    saved = run(test_checkpoint.save, *arguments, options=options_of(inner))[0]
    run(test_checkpoint.resume, saved, *arguments, options=options_of(inner))


def _identity_in_tf32(rank: int) -> None:
    torch.set_float32_matmul_precision("high")
    test_identity.identity(rank, options_of(), device="cuda")
    # The live residual: a comparison mends a difference, and sets what was delivered apart.
    test_check_every.damaged(rank, 1, "1", "cuda")


def test_a_residual_has_all_bits_if_products_are_allowed_fewer() -> None:
    run(_identity_in_tf32, options=options_of(check_every=3, min_numel=500))


def _local_steps(rank: int) -> None:
    """Takes local steps whose rounds go on beside them, and ends with equal models."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.Linear(64, 48)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    outer = torch.optim.SGD(model.parameters(), lr=0.8, momentum=0.3, nesterov=True)
    arguments = {"fragments": 2, "fragment_sync_delay": 3, "warmup_steps": 2}
    options = {"matrix_approximation_rank": 2, "wire_dtype": "int8"}
    with tp.DiLoCo(model, optimizer, outer, 4, options, **arguments) as steps:
        for i in range(15):
            optimizer.zero_grad()
            model(gradient((6, 48), "input", rank, i).cuda()).square().mean().backward()
            optimizer.step()
        steps.load_state_dict(steps.state_dict())
    assert steps.stats()["round_ratio"] > 4
    assert models_agree(model)


@pytest.mark.parametrize("inner", INNERS)
def test_local_steps(inner: str) -> None:
    run(_local_steps, options=options_of(inner))
