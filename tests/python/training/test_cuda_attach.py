# SPDX-License-Identifier: BSD-3-Clause
"""On a GPU: the compression moves to other groups, and a CUDA graph captures whole steps of DDP."""

from __future__ import annotations

import os

import test_previous
import test_rewrapping
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.cuda_ranks import needs_cuda, run
from support.synthetic import gradient
from support.tensors import digest

pytestmark = needs_cuda

WARM_UP = 12  # DDP reads its timers in the first ten steps and every hundredth
OPTIONS = tp.Options(start_powerSGD_iter=3)  # int8 on the wire


def test_the_residual_moves_to_another_default_group() -> None:
    run(test_rewrapping.replace_the_default_group, "cuda")


def test_who_stays_keeps_its_residual_and_who_joins_starts_with_none() -> None:
    run(test_previous.stay_and_join, "ddp", "int8", "cuda", world_size=3)


class _Training:
    """A DDP module with a group and an optimizer of its own, and an input at a fixed address."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(48, 512), nn.Tanh(), nn.Linear(512, 48)).cuda()
        group = dist.new_group(backend="cuda:powersgd", pg_options=OPTIONS)
        self.ddp = DistributedDataParallel(layers, process_group=group, bucket_cap_mb=0.05)
        tp.attach(self.ddp)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05, momentum=0.9)
        self.inputs = torch.zeros(16, 48, device="cuda")

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.ddp(self.inputs) - self.inputs).square().mean().backward()
        self.optimizer.step()

    def digest(self) -> str:
        torch.cuda.synchronize()
        return digest(self.ddp.parameters())


def _captured(rank: int) -> list[tuple[str, str]]:
    """The parameters' hashes after replays of a step, and after the same steps one by one."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # as DDP demands of captured steps
    stream = torch.cuda.Stream()
    found = []
    with torch.cuda.stream(stream):
        captured, plain = _Training(), _Training()
        graph = torch.cuda.CUDAGraph()
        for i in range(WARM_UP + 3):
            for training in (captured, plain):
                training.inputs.copy_(gradient((16, 48), "input", rank, i))
            plain.step()
            if i < WARM_UP:
                captured.step()
                continue
            if i == WARM_UP:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    captured.step()
            graph.replay()
            found.append((captured.digest(), plain.digest()))
    del graph  # before the groups: a communicator waits for the graphs that hold it
    return found


def test_whole_steps_in_a_cuda_graph() -> None:
    found, other = run(_captured)
    assert found == other
    assert all(replayed == stepped for replayed, stepped in found)
    assert len({replayed for replayed, _ in found}) == 3
