# SPDX-License-Identifier: BSD-3-Clause
"""It trains, and the ranks agree: what to know first of a new machine.

pytest tests/python/training/test_smoke.py -k cuda
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import cuda_ranks, ranks
from support.cuda_ranks import needs_cuda
from support.synthetic import gradient
from support.tensors import digest
from torch_powersgd._core import _C
from torch_powersgd.options import to_core

EXACT_STEPS = 3
STEPS = 8
WIDTH = 64
OPTIONS = tp.Options(start_powerSGD_iter=EXACT_STEPS)  # int8 on the wire


def _train(rank: int, device: str) -> tuple[list[str], list[float], dict[str, Any]]:
    """The digest of the parameters after each step, the losses, and the statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4096), nn.ReLU(), nn.Linear(4096, WIDTH)).to(device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1)  # a bucket for each layer
    tp.attach(ddp)
    optimizer = torch.optim.AdamW(ddp.parameters())
    inputs = gradient((32, WIDTH), "inputs", rank).to(device)
    digests, losses = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1))
        loss.backward()
        optimizer.step()
        digests.append(digest(model.parameters()))
        losses.append(loss.item())
    return digests, losses, tp.stats()


@pytest.mark.parametrize(
    ("world_size", "device", "inner"),
    [
        *(pytest.param(n, "cuda", "auto", marks=needs_cuda) for n in (1, 2, 4, 8)),
        pytest.param(2, "cuda", "gloo", marks=needs_cuda),
        *((n, "cpu", "auto") for n in (1, 2, 4)),
    ],
)
def test_ranks_train_and_agree(world_size: int, device: str, inner: str) -> None:
    if world_size > 2:
        p, _ = _C.traffic_of([(4096, WIDTH)], to_core(OPTIONS), torch.float32, device, world_size)
        assert p.schedule == "two-shot"
    arguments: Any = {"options": dataclasses.replace(OPTIONS, inner=inner)}
    if device == "cuda":
        timeout = 5.0 * max(5, world_size)  # which take turns on the device
        results = cuda_ranks.run(
            _train, device, world_size=world_size, timeout=timeout, **arguments
        )
    else:
        results = ranks.run(world_size, _train, device, **arguments)
    for digests, losses, stats in results:
        assert len(set(digests)) == STEPS
        assert digests == results[0][0]
        assert losses[-1] < 0.8 * losses[0]
        assert stats["steps"] == STEPS
        if world_size > 1:  # one rank sends nothing
            assert stats["compressed_calls"] > STEPS - EXACT_STEPS  # of several buckets
        assert stats["skipped_steps"] == 0
