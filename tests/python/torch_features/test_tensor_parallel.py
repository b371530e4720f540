# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallelism in one dimension of a mesh, compressed data parallelism in another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.meshes import mesh_of
from support.on_ranks import on_ranks
from support.paired_training import OPTIONS, TrainingPair
from support.synthetic import gradient

# Every all-reduce of activations has more elements than this: only its kind keeps it exact.
SMALL = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2, min_numel=16)
PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def _make(mesh: DeviceMesh) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 36), nn.Tanh(), nn.Linear(36, 30))
    parallelize_module(net, mesh["tensor"], PLAN)
    return DistributedDataParallel(net, device_mesh=mesh["replicate"])


def _backward(ddp: DistributedDataParallel, replica: int, i: int) -> list[torch.Tensor | None]:
    """Returns what depends on all that tensor parallelism sends: the loss, the input's gradient."""
    x = gradient((6, 24), "input", replica, i).requires_grad_()
    loss = ddp(x).square().mean()
    loss.backward()
    return [loss, x.grad]


@pytest.mark.parametrize(
    "tensor_backend", ["gloo", ("cpu:powersgd", SMALL)], ids=["gloo", "powersgd"]
)
@on_ranks(4, backend="gloo")
def test_beside_ddp(rank: int, tensor_backend: Any) -> None:
    mesh = mesh_of(("cpu:powersgd", OPTIONS), ("tensor", 2), tensor=tensor_backend)
    attached, plain = _make(mesh), _make(mesh_of("gloo", ("tensor", 2)))
    pair = TrainingPair(attached, plain, tp.attach(attached))
    pair.train(lambda ddp, i: _backward(ddp, mesh.get_local_rank("replicate"), i))
    pair.check()
    assert pair.residuals().keys() == {"0.weight", "2.weight"}
    assert list(pair.compression.state_dict()) == [f"shard {mesh.get_local_rank('tensor')} of 2"]
    if tensor_backend != "gloo":
        assert tp.stats(mesh.get_group("tensor"))["compressed_calls"] == 0


@on_ranks(4, backend="gloo")
def test_attach_after_the_first_forward_pass_says_why_not(rank: int) -> None:
    ddp = _make(mesh_of(("cpu:powersgd", OPTIONS), ("tensor", 2)))
    _backward(ddp, 0, 0)
    with pytest.raises(ValueError, match="first forward pass"):
        tp.attach(ddp)
