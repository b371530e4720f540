# SPDX-License-Identifier: BSD-3-Clause
"""Gradients in float64 are averaged exactly, beside others that are compressed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed._composable.replicate_with_fsdp import replicate

import torch_powersgd as tp
from support.meshes import mesh_of
from support.models import Dtypes
from support.on_ranks import on_ranks
from support.paired_training import OPTIONS, STEPS, WARM_UP, TrainingPair, ddp_pair
from support.synthetic import Synthetic, gradient
from support.tensors import Tensors, same

SHAPES: dict[str, tuple[int, ...]] = {"exact": (40, 32), "compressed": (48, 40)}


def _ddp() -> TrainingPair:
    return ddp_pair(lambda _: Dtypes())


def _fsdp() -> TrainingPair:
    attached, plain = (_replicated(backend) for backend in (("cpu:powersgd", OPTIONS), "gloo"))
    return TrainingPair(attached, plain, tp.attach(attached))


def _replicated(backend: Any) -> Any:
    mesh = mesh_of(backend, ("shard", 1))["replicate"]
    torch.manual_seed(0)
    module = Dtypes()
    for part in (module.fp32, module.bf16, module.fp64):  # a unit has one dtype
        replicate(part, mesh=mesh)
    return replicate(module, mesh=mesh)


def _square(module: Any, i: int) -> list[torch.Tensor]:
    loss = module(gradient((8, 24), "input", torch.distributed.get_rank(), i)).square().mean()
    loss.backward()
    return [loss]


@pytest.mark.parametrize("make", [_ddp, _fsdp])
@on_ranks(2, options=OPTIONS)
def test_a_module(rank: int, make: Callable[[], TrainingPair]) -> None:
    pair = make()
    for _ in range(STEPS):
        pair.train(_square, 1)
        mine, plain = (
            {name: pair.gradients(k)[name] for name in ("fp64.weight", "fp64.bias")} for k in (0, 1)
        )
        assert same(mine.values(), plain.values())
    assert pair.residuals().keys() == {"fp32.weight", "bf16.weight"}
    stats = pair.compression.stats()
    assert stats["exact_calls"] == 3 * WARM_UP + STEPS - WARM_UP
    assert stats["compressed_calls"] == 2 * (STEPS - WARM_UP)


def _values(rank: int, i: int) -> Tensors:
    """Gradients or movements of a rank, with all the digits of their dtype."""
    found = {name: gradient(shape, name, rank, i) for name, shape in SHAPES.items()}
    return {"exact": found["exact"].double() / 3, "compressed": found["compressed"]}


@on_ranks(2)
def test_local_steps(rank: int) -> None:
    """The anchors move by the exact mean of the changes."""
    model = Synthetic({name: torch.zeros_like(value) for name, value in _values(0, 0).items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    tp.LocalSGD(model, optimizer, 2, warmup_steps=0)
    anchor = torch.zeros_like(model.weights["exact"])
    for round_ in range(3):
        locals_ = [anchor.clone(), anchor.clone()]
        for i in (2 * round_, 2 * round_ + 1):
            for r, parameter in enumerate(locals_):
                parameter += _values(r, i)["exact"]
            for name, value in _values(rank, i).items():
                model.weights[name].grad = -value
            optimizer.step()
        anchor -= ((anchor - locals_[0]) + (anchor - locals_[1])) / 2
        assert torch.equal(model.weights["exact"], anchor)
