# SPDX-License-Identifier: BSD-3-Clause
"""Local steps of groups of processes, which average or shard among themselves in every step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.on_ranks import all_agree, on_ranks
from support.synthetic import gradient
from support.tensors import relative_error, same

EVERY = 3
OPTIONS = {"matrix_approximation_rank": 2}
WORLD_SIZE = 4
ROUNDS = 2


class Net(nn.Module):
    """Shards of 401 rows over two processes are uneven, and one has nothing of ``gain``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 401)
        self.gain = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(401, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(torch.tanh(self.first(x)) * self.gain)
        return output


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        model(gradient((6, 24), "input", rank, i)).square().mean().backward()
        optimizer.step()


def _mesh() -> DeviceMesh:
    """Two hosts of two processes."""
    return init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("hosts", "host"),
        backend_override={"hosts": "cpu:powersgd", "host": "gloo"},
    )


@torch.no_grad()
def _evaluate(model: nn.Module) -> torch.Tensor:
    """Leaves the root of FSDP2 whole, because no backward pass follows."""
    output: torch.Tensor = model(torch.ones(1, 24))
    return output


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters of a model, of all its shards. Collective."""
    return {
        name: p.full_tensor() if isinstance(p, dist.tensor.DTensor) else p.detach()
        for name, p in model.named_parameters()
    }


@on_ranks(WORLD_SIZE, backend="gloo")
def test_replicas_of_ddp_and_shards_of_fsdp_take_the_same_steps(rank: int, tmp_path: Path) -> None:
    """Two hosts of two processes. FSDP2's shards are compressed as matrices of their own."""
    mesh = _mesh()
    hosts = mesh.get_group("hosts")
    for options, density in ((tp.Options(scope="never"), None), (OPTIONS, None), (None, 1 / 16)):
        replicated = DistributedDataParallel(_net(), process_group=mesh.get_group("host"))
        sharded = _net()
        fully_shard(sharded, mesh=mesh["host"])
        ended = []
        for model in (replicated, sharded):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            _evaluate(model)
            schedule: dict[str, Any] = {"warmup_steps": 0, "density": density}
            steps = tp.LocalSGD(model, optimizer, EVERY, options, group=hosts, **schedule)
            _train(model, optimizer, rank, EVERY * ROUNDS)
            _evaluate(model)
            steps.sync(exact=True)
            dcp.save({"steps": steps}, checkpoint_id=tmp_path)
            before, output = _whole(model), _evaluate(model)
            _train(model, optimizer, rank, 1)
            assert not torch.equal(_evaluate(model), output)
            dcp.load({"steps": steps}, checkpoint_id=tmp_path)
            assert same(_whole(model).values(), before.values())
            assert torch.equal(_evaluate(model), output)
            steps.detach()
            assert all_agree([p.tolist() for p in _whole(model).values()])
            ended.append(_whole(model))
        if isinstance(options, tp.Options):  # The sums of gradients are in another order.
            for name, value in ended[1].items():
                assert relative_error(value, ended[0][f"module.{name}"]) < 1e-5, name


@on_ranks(WORLD_SIZE)
def test_beside_post_local_sgd(rank: int) -> None:
    """DDP averages over all at first, then within a host, by torch's hook; LocalSGD over all."""
    hosts = [dist.new_group(members, backend="gloo") for members in ([0, 1], [2, 3])]
    ddp = DistributedDataParallel(_net())
    ddp.register_comm_hook(PostLocalSGDState(None, hosts[rank // 2], 2), post_localSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    steps = tp.LocalSGD(ddp, optimizer, EVERY, {"scope": "never"}, warmup_steps=2)
    for i in range(2 + EVERY * ROUNDS):
        optimizer.zero_grad()
        ddp(gradient((6, 24), "input", rank, i)).square().mean().backward()
        optimizer.step()
        mine = [p.tolist() for p in ddp.parameters()]
        assert all_agree(mine) is (i < 2 or (i - 1) % EVERY == 0)
        assert all_agree(mine, hosts[rank // 2])
    assert steps.stats()["round_ratio"] == EVERY


@on_ranks(WORLD_SIZE, backend="gloo")
def test_what_is_averaged_anyway_is_refused(rank: int) -> None:
    mesh = _mesh()
    hybrid = _net()
    fully_shard(hybrid, mesh=mesh)
    optimizer = torch.optim.SGD(hybrid.parameters(), lr=0.1)
    message = "call fully_shard with the mesh of the shards alone"
    with pytest.raises(ValueError, match=re.escape(message)):
        tp.LocalSGD(hybrid, optimizer, EVERY, group=mesh.get_group("hosts"))


@on_ranks(WORLD_SIZE, backend="gloo")
def test_a_group_with_other_parts_of_the_model_is_refused(rank: int) -> None:
    """The parts of one process would replace those of another."""
    mesh, everyone = _mesh(), dist.new_group(backend="cpu:powersgd")
    host = mesh.get_group("host")
    sharded = _net()
    fully_shard(sharded, mesh=mesh["host"])
    flat = FullyShardedDataParallel(_net(), process_group=host, device_id=torch.device("cpu"))
    ddp = DistributedDataParallel(_net(), process_group=host)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, process_group=host, lr=0.1)
    parts: list[tuple[nn.Module, torch.optim.Optimizer, str]] = [
        (sharded, torch.optim.SGD(sharded.parameters()), "'gain'"),
        (flat, torch.optim.SGD(flat.parameters()), "FullyShardedDataParallel"),
        (ddp, zero, "ZeroRedundancyOptimizer"),
    ]
    for model, optimizer, what in parts:
        with pytest.raises(ValueError, match=f"{what} is split over processes of this group"):
            tp.LocalSGD(model, optimizer, EVERY, group=everyone)
    tp.LocalSGD(ddp, zero, EVERY, group=mesh.get_group("hosts")).detach()
