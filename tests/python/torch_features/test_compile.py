# SPDX-License-Identifier: BSD-3-Clause
"""DDP under torch.compile: the graph is split at DDP's buckets, and the hook still gets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.paired_training import OPTIONS, WARM_UP, Facts, TrainingPair, train
from support.synthetic import gradient

TOLERANCE = 1e-5  # the identity in float32, as in test_identity


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


def _loss(forward: Any, rank: int, i: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    x = gradient((8, 512), "input", rank, i).requires_grad_()
    return forward(x).square().mean(), [x]


def _compiled(rank: int, backend: str, optimize_ddp: bool) -> Facts:
    torch._dynamo.config.optimize_ddp = optimize_ddp
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def wrap(ddp: DistributedDataParallel) -> Any:
        return torch.compile(ddp, backend=counting)

    pair = TrainingPair(lambda _: Layers(), wrap, bucket_cap_mb=1)
    facts = train(pair, _loss, rank)
    facts.extra = len(graphs), tp.stats()["compressed_calls"]
    return facts


@pytest.mark.parametrize("optimize_ddp", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_compiled_module(backend: str, optimize_ddp: bool) -> None:
    results = ranks.run(2, _compiled, backend, optimize_ddp, options=OPTIONS, timeout=400)
    for facts in results:
        assert facts.warm_up == [True] * WARM_UP
        assert all(facts.exact)
        assert not any(facts.compressed)
        assert max(facts.errors.values()) < TOLERANCE, facts.errors
        graphs, calls = facts.extra
        assert (graphs > 1) == optimize_ddp  # DDPOptimizer splits the graph
        assert calls > 6  # several buckets a step
    assert results[0].replica == results[1].replica


def _python_reducer(rank: int) -> None:
    torch._dynamo.config.optimize_ddp = "python_reducer"
    ddp = DistributedDataParallel(Layers())
    with pytest.raises(ValueError, match="python_reducer"):
        tp.attach(ddp)


def test_the_python_reducer_is_refused() -> None:
    ranks.run(1, _python_reducer)
