# SPDX-License-Identifier: BSD-3-Clause
"""The buckets of tensors that are attached by name: how large, and where in memory."""

from __future__ import annotations

import pytest
import torch

import torch_powersgd as tp
import torch_powersgd.attachment
from support.on_ranks import on_ranks
from support.operators import Operators
from support.synthetic import gradient
from support.tensors import Tensors, same
from torch_powersgd.targets import target_of

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
SHAPES = {"wide": (11, 67), "bias": (16,), "scalar": (), "empty": (0, 5), "tall": (83, 13)}


def _values(rank: int, i: int) -> Tensors:
    return {name: gradient(shape, name, rank, i) for name, shape in SHAPES.items()}


def _in_one_buffer(values: Tensors, order: int, gap: int) -> Tensors:
    """Copies of values, in an order and so far apart, in the middle of a buffer."""
    buffer = torch.zeros(1000 + sum(value.numel() + gap for value in values.values()))
    placed, offset = {}, 501
    for name in [*values][::order]:
        placed[name] = buffer[offset:][: values[name].numel()].view(values[name].shape)
        placed[name].copy_(values[name])
        offset += values[name].numel() + gap
    return {name: placed[name] for name in values}


@pytest.mark.parametrize(("order", "gap"), [(1, 0), (1, 3), (-1, 0)])
@on_ranks(2)
def test_tensors_side_by_side_are_averaged_where_they_are(rank: int, order: int, gap: int) -> None:
    apart, together = (tp.attach(_values(0, 0), OPTIONS) for _ in range(2))
    for i in range(4):
        values = _values(rank, i)
        tensors = _in_one_buffer(values, order, gap)
        with Operators() as operators:
            work = together.all_reduce(tensors)
        work.wait()
        assert ("cat" in operators.names) is ((order, gap) != (1, 0))
        apart.all_reduce(values).wait()
        assert same(tensors.values(), values.values())


@pytest.mark.parametrize(("device", "megabytes"), [("cpu", 25), ("meta", 100)])
def test_buckets_are_larger_on_gpus(device: str, megabytes: int) -> None:
    target = target_of({"w": torch.zeros(3, 3, device=device)})
    assert torch_powersgd.attachment.bucket_bytes(target) == megabytes << 20
