# SPDX-License-Identifier: BSD-3-Clause
"""DDP under torch.compile: the graph is split at DDP's buckets, and the hook still gets them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.on_ranks import on_ranks
from support.paired_training import OPTIONS, ddp_pair
from support.synthetic import gradient


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Each layer has 1 MB: a bucket, to DDP and to DDPOptimizer.
        self.hidden = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))
        self.last = nn.Linear(512, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        output: torch.Tensor = self.last(x)
        return output


def train_compiled(rank: int, backend: str, optimize_ddp: bool, device: str) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool takes longer to start
    torch._dynamo.config.optimize_ddp = optimize_ddp
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def backward(ddp: DistributedDataParallel, i: int) -> list[torch.Tensor | None]:
        x = gradient((8, 512), "input", rank, i).to(device).requires_grad_()
        loss = compiled[ddp](x).square().mean()
        loss.backward()
        return [loss, x.grad]

    pair = ddp_pair(lambda _: Layers(), device, bucket_cap_mb=1)
    compiled: dict[Any, Any] = {ddp: torch.compile(ddp, backend=counting) for ddp in pair.modules}
    pair.train(backward)
    pair.check()
    assert (len(graphs) > 1) == optimize_ddp  # DDPOptimizer splits the graph
    assert tp.stats()["compressed_calls"] > 6  # several buckets a step


@pytest.mark.parametrize("optimize_ddp", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@on_ranks(2, options=OPTIONS)
def test_a_compiled_module(rank: int, backend: str, optimize_ddp: bool) -> None:
    train_compiled(rank, backend, optimize_ddp, "cpu")


@on_ranks(1)
def test_the_python_reducer_is_refused(rank: int) -> None:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    ddp = DistributedDataParallel(Layers())
    with pytest.raises(ValueError, match="python_reducer"):
        tp.attach(ddp)
