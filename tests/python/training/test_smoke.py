# SPDX-License-Identifier: BSD-3-Clause
"""It trains, and the ranks agree: what to know first of a new machine.

pytest tests/python/training/test_smoke.py -k cuda
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import cuda_ranks, ranks
from support.cuda_ranks import needs_cuda
from support.synthetic import gradient
from support.tensors import bits
from torch_powersgd._core import _C
from torch_powersgd.options import to_core

CUDA = pytest.param("cuda", marks=needs_cuda)
EXACT_STEPS = 3
STEPS = 8
WIDTH = 64
OPTIONS = tp.Options(start_powerSGD_iter=EXACT_STEPS)  # int8 on the wire


def _train(rank: int, device: str) -> tuple[list[str], list[float], dict[str, Any]]:
    """The parameters' hash after each step, the losses, and the statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4096), nn.ReLU(), nn.Linear(4096, WIDTH)).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)  # a bucket for each layer
    tp.attach(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters())
    inputs = gradient((32, WIDTH), "inputs", rank).to(device)
    hashes, losses = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        contents = b"".join(bits(parameter) for parameter in model.parameters())
        hashes.append(hashlib.sha256(contents).hexdigest())
        losses.append(loss.item())
    return hashes, losses, tp.stats()


def _check(world_size: int, device: str, inner: str = "auto") -> None:
    options = dataclasses.replace(OPTIONS, inner=inner)
    if device == "cuda":
        timeout = 5.0 * max(5, world_size)  # which take turns on the device
        arguments: Any = {"options": options, "world_size": world_size, "timeout": timeout}
        results = cuda_ranks.run(_train, device, **arguments)
    else:
        results = ranks.run(world_size, _train, device, options=options)
    for hashes, losses, stats in results:
        assert len(set(hashes)) == STEPS
        assert hashes == results[0][0]
        assert losses[-1] < 0.8 * losses[0]
        assert stats["steps"] == STEPS
        if world_size > 1:  # one rank sends nothing
            assert stats["compressed_calls"] > STEPS - EXACT_STEPS  # of several buckets
        assert stats["skipped_steps"] == 0


@pytest.mark.parametrize("device", [CUDA, "cpu"])
def test_one_rank_trains(device: str) -> None:
    _check(1, device)


@pytest.mark.parametrize(
    ("device", "inner"),
    [
        pytest.param("cuda", "auto", marks=needs_cuda),
        pytest.param("cuda", "gloo", marks=needs_cuda),
        ("cpu", "auto"),
    ],
)
def test_two_ranks_agree(device: str, inner: str) -> None:
    _check(2, device, inner)


@pytest.mark.parametrize(
    ("world_size", "device"),
    [
        pytest.param(4, "cuda", marks=needs_cuda),
        pytest.param(8, "cuda", marks=needs_cuda),
        (4, "cpu"),
    ],
)
def test_more_ranks_agree_two_shot(world_size: int, device: str) -> None:
    p, _ = _C.traffic_of([(4096, WIDTH)], to_core(OPTIONS), torch.float32, device, world_size)
    assert p.schedule == "two-shot"
    _check(world_size, device)
