# SPDX-License-Identifier: BSD-3-Clause
"""Trains on two processes: a step with compressed gradients, then a round of local steps.

    python .ci/two_ranks.py

It needs torch and this package alone, so it also checks a build where the tests' tools are not
installed. Any failure ends it with an error.
"""

from __future__ import annotations

import platform
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd

RANKS = 2


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        inputs = torch.randn(8, 256)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1)).backward()
        optimizer.step()


def check_equal(ddp: DistributedDataParallel) -> None:
    mine = nn.utils.parameters_to_vector(ddp.parameters()).detach()
    first = mine.clone()
    dist.broadcast(first, 0)
    assert mine.equal(first), "the ranks' parameters differ"


def main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("cpu:powersgd", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
    optimizer = torch.optim.AdamW(ddp.parameters())
    compression = torch_powersgd.attach(ddp, {"start_powerSGD_iter": 2})
    train(ddp, optimizer, 4)
    check_equal(ddp)
    counts = compression.stats()
    assert counts["compressed_calls"] > 0, counts
    assert counts["compressed_ratio"] > 1, counts
    compression.detach()
    with torch_powersgd.LocalSGD(ddp, optimizer, 2, warmup_steps=1) as steps:
        train(ddp, optimizer, 5)
        rounds = steps.stats()
        assert rounds["round_ratio"] > 2, rounds  # of the two steps, and compression
    check_equal(ddp)  # the block ends with an exact average
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(main, (folder,), RANKS)
    done = "a compressed step and a round of local steps on two processes"
    print(f"Python {platform.python_version()}, torch {torch.__version__}: {done}")
