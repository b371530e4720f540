# SPDX-License-Identifier: BSD-3-Clause
"""Shadow mode: outputs are plain DDP's to the bit, and errors are those of attached training."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.ddp import make_attached, make_compressed, make_ddp, step
from support.models import Spectral
from support.synthetic import COMPRESSED, SHAPES, gradient, gradients, mean_gradients
from support.tensors import Tensors, same
from torch_powersgd.cli.plan import rows_of
from torch_powersgd.cli.shadow import verdict
from torch_powersgd.shadow_mode import Shadow

STEPS = 5
Errors = dict[str, float]


def _mine(rank: int, i: int, device: str = "cpu") -> Tensors:
    return {name: g.to(device) for name, g in gradients(SHAPES, rank, i).items()}


def _expected_errors(
    rank: int, approximation: int, world_size: int, options: Any, device: str
) -> Errors:
    """The errors of an attached model, in float64."""
    start = {"matrix_approximation_rank": approximation, "start_powerSGD_iter": 0}
    ddp = make_attached(SHAPES, tp.Options(**{**options, **start}), device=device)
    squares = {name: [0.0, 0.0] for name in SHAPES}
    for i in range(STEPS):
        outputs, mean = step(ddp, _mine(rank, i, device)), mean_gradients(SHAPES, world_size, i)
        for name, (error, size) in squares.items():
            error += (outputs[name].cpu().double() - mean[name]).square().sum().item()
            size += mean[name].square().sum().item()
            squares[name] = [error, size]
    errors = {name: math.sqrt(error / size) for name, (error, size) in squares.items()}
    errors["all"] = math.sqrt(
        sum(error for error, _ in squares.values()) / sum(size for _, size in squares.values())
    )
    return errors


def compared(
    rank: int, world_size: int, options: dict[str, Any], shadow_group: str, device: str = "cpu"
) -> None:
    """Compares the errors of a shadow with attached training, and its outputs with plain DDP's."""
    expected = {r: _expected_errors(rank, r, world_size, options, device) for r in (1, 3)}
    group = dist.new_group(backend=shadow_group)
    plain = make_ddp(SHAPES, process_group=dist.new_group(backend="gloo"), device=device)
    shadowed = make_ddp(SHAPES, process_group=group, device=device)
    shadow = tp.shadow(shadowed, ranks=(1, 3), steps=STEPS, options=options)
    assert not shadow.done
    assert str(shadow) == f"shadow has taken 0 of {STEPS} steps"
    for i in range(STEPS + 2):
        mine = _mine(rank, i, device)
        exact, outputs = step(plain, mine), step(shadowed, mine)
        assert all(torch.equal(exact[name], outputs[name]) for name in SHAPES)
    assert shadow.done
    assert shadow.step == STEPS
    for r, errors in expected.items():
        assert shadow.error(r) == pytest.approx(errors["all"], rel=1e-5)
        for name, layer in zip(SHAPES, shadow.layers[r], strict=True):
            assert layer.name == f"weights.{name}"
            assert layer.shape == SHAPES[name]
            assert layer.rank == (r if name in COMPRESSED else 0)
            # Raw float32 parameters are exact to the rounding of their sum.
            assert layer.error == pytest.approx(errors[name], rel=1e-5, abs=1e-6)
            assert layer.bytes_before == 4 * torch.Size(SHAPES[name]).numel()
            assert layer.bytes_after < layer.bytes_before or name not in COMPRESSED
    assert shadow.error(1) > shadow.error(3) > 0.1
    each = ", ".join(f"{shadow.error(r):.3f} at matrix rank {r}" for r in (1, 3))
    assert str(shadow) == f"error of the compressed gradients over {STEPS} steps: {each}"


@pytest.mark.parametrize(
    ("world_size", "wire", "backend"), [(2, None, "cpu:powersgd"), (3, "int8", "gloo")]
)
def test_errors_are_those_of_attached_training(
    world_size: int, wire: str | None, backend: str
) -> None:
    ranks.run(world_size, compared, world_size, {"wire_dtype": wire}, backend)


def _complex(rank: int) -> None:
    """Complex parameters count as pairs of real numbers, in the plan and in errors as well."""
    options = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
    torch.manual_seed(0)
    models = [Spectral(), Spectral()]
    models[1].load_state_dict(models[0].state_dict())
    shadowed = DistributedDataParallel(models[0])
    shadow = tp.shadow(shadowed, ranks=[2], steps=3, options=options)
    plain = DistributedDataParallel(models[1], process_group=dist.new_group(backend="gloo"))
    for i in range(3):
        x = gradient((8, 24), "input", rank, i)
        for ddp in (shadowed, plain):
            ddp.zero_grad()
            ddp(x).square().mean().backward()
        assert same(*([p.grad for p in ddp.parameters()] for ddp in (shadowed, plain)))
    layers = {layer.name: layer for layer in shadow.layers[2]}
    planned = {row.name: row for row in rows_of(models[0], options)}
    for name, numel in {"modes": 24 * 40, "transposed": 18 * 40}.items():
        assert layers[name].rank == planned[name].rank == 2
        assert 0.1 < layers[name].error < 1.5
        assert layers[name].bytes_before == planned[name].gradient_bytes == 4 * numel
    assert layers["modes"].bytes_after == planned["modes"].sent_bytes == 4 * 2 * (24 + 40)
    assert layers["precise"].rank == planned["precise"].rank == layers["precise"].error == 0
    assert layers["precise"].bytes_after == planned["precise"].sent_bytes == 8 * 18 * 26


def test_complex_parameters() -> None:
    ranks.run(2, _complex)


def _apart(rank: int) -> None:
    """The counts of the user's own group know nothing of the shadow."""
    ddp, compression = make_compressed(SHAPES, tp.Options.hook_defaults(start_powerSGD_iter=0))
    step(ddp, _mine(rank, 0))
    before, norms = tp.stats(), compression.stats()["residual_norms"]
    shadowed = make_ddp(SHAPES)
    tp.shadow(shadowed, steps=2, ranks=[2])
    for i in range(3):
        step(shadowed, _mine(rank, i))
    assert tp.stats()["compressed_calls"] == before["compressed_calls"]
    assert compression.stats()["residual_norms"] == norms
    step(ddp, _mine(rank, 1))
    assert tp.stats()["compressed_calls"] > before["compressed_calls"]


def test_a_shadow_is_apart_from_the_groups_counts() -> None:
    ranks.run(2, _apart)


def _overflow(rank: int) -> None:
    ddp = make_ddp(SHAPES)
    shadow = tp.shadow(ddp, ranks=(1,), steps=3)
    for i in range(3):
        mine = _mine(rank, i)
        if i == 1 and rank == 1:
            mine["wide"] = mine["wide"] * float("inf")
        step(ddp, mine)
    assert 0 < shadow.error(1) < 2


def test_a_step_that_overflows_counts_as_no_error() -> None:
    ranks.run(2, _overflow, backend="gloo")


def _refusals(rank: int) -> None:
    def refuses(message: str, module: Any, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            tp.shadow(module, **arguments)

    ddp = make_ddp(SHAPES)
    refuses("ddp must be a DistributedDataParallel module, got Linear", torch.nn.Linear(2, 2))
    refuses("steps must be an integer >= 1, got 0", ddp, steps=0)
    refuses("ranks must be one or more distinct integers >= 1, got []", ddp, ranks=[])
    refuses("ranks must be one or more distinct integers >= 1, got [4, 4]", ddp, ranks=[4, 4])
    refuses("matrix_approximation_rank must be", ddp, ranks=[0])
    refuses("options of shadow: 'rank' is not an option", ddp, options={"rank": 4})
    refuses(
        "of shadow must be the same on all ranks: steps is 3 on rank 0 and 4 on rank 1",
        ddp,
        steps=3 + rank,
    )
    shadow = tp.shadow(ddp, ranks=[2], steps=2)
    with pytest.raises(ValueError, match="shadow has taken 0 of 2 steps"):
        shadow.error(2)
    refuses("already has a communication hook", ddp)
    with pytest.raises(ValueError, match="already has a communication hook"):
        tp.attach(ddp)
    for i in range(2):
        step(ddp, _mine(rank, i))
    with pytest.raises(ValueError, match=r"rank must be one of \[2\], got 4"):
        shadow.error(4)


def test_arguments_that_are_refused() -> None:
    ranks.run(2, _refusals)


def _alone(rank: int) -> None:
    with pytest.raises(ValueError, match="shadow needs a group of at least two ranks, got one"):
        tp.shadow(make_ddp(SHAPES))


def test_one_rank_has_nothing_to_compare() -> None:
    ranks.run(1, _alone, backend="gloo")


def test_errors_that_do_not_fall_with_the_rank_say_that_they_rank_nothing() -> None:
    """As those of a small GPT early in training, whose losses fell with the rank."""
    shadow = object.__new__(Shadow)
    shadow.step = shadow.steps = 50
    for errors, in_order in (([1.07, 0.6, 0.0, 0.0], True), ([1.07, 1.19, 1.14, 0.6], False)):
        shadow._errors = dict(zip((1, 4, 16, 64), errors, strict=True))
        shadow.ranks = tuple(shadow._errors)
        layers: Any = {rank: [SimpleNamespace(rank=rank)] for rank in shadow.ranks}
        shadow.layers = layers
        assert ("don't say which loss is lower" not in str(shadow)) is in_order
        assert ("don't tell which matrix rank" not in verdict(shadow, [])) is in_order
