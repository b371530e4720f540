# SPDX-License-Identifier: BSD-3-Clause
"""The names that a fragment of code in the docs relies on: ``<!-- run with: NAME -->``.

Each function in ``PREAMBLES`` returns the names that the fragment can use. All of them make the
default process group.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd
from support.meshes import mesh_of

Names = dict[str, Any]

WIDTH = 64
# Small layers are compressed at matrix rank 4 from the second step on.
OPTIONS: dict[str, Any] = {
    "matrix_approximation_rank": 4,
    "wire_dtype": torch.bfloat16,
    "start_powerSGD_iter": 2,
    "allow_discard": True,
}


def _common() -> Names:
    return {
        "contextlib": contextlib,
        "logging": logging,
        "os": os,
        "torch": torch,
        "dist": dist,
        "dcp": dcp,
        "nn": nn,
        "DistributedDataParallel": DistributedDataParallel,
        "DDP": DistributedDataParallel,
        "torch_powersgd": torch_powersgd,
        "device": torch.device("cpu"),
        "options": torch_powersgd.Options(**OPTIONS),
        "path": "checkpoint.pt",
        "step": 20,
        "folder": Path("checkpoint"),
    }


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def _batches() -> list[torch.Tensor]:
    torch.manual_seed(1 + dist.get_rank())
    return [torch.randn(8, WIDTH) for _ in range(6)]


def _loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def group() -> Names:
    """A process group and a model in it that nothing has wrapped."""
    dist.init_process_group("cpu:powersgd")
    batches = _batches()
    return _common() | {
        "model": _model(),
        "batches": batches,
        "batch": batches[0],
        "loss_of": _loss_of,
    }


def ddp() -> Names:
    """A DDP module that is not attached yet, its optimizer and its data."""
    names = group()
    module = DistributedDataParallel(names["model"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = _loss_of(module, names["batch"])
    return names | {"ddp": module, "optimizer": optimizer, "loss": loss, "K": 2}


def attached() -> Names:
    """The same, attached, after some compressed steps."""
    names = ddp()
    compression = torch_powersgd.attach(names["ddp"], names["options"])
    for batch in names["batches"]:
        _loss_of(names["ddp"], batch).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
    return names | {"compression": compression, "loss": _loss_of(names["ddp"], names["batch"])}


def gan() -> Names:
    """Two attached modules, one of which trains through the other."""
    names = group()
    modules = {name: DistributedDataParallel(_model()) for name in ("generator", "discriminator")}
    for module in modules.values():
        torch_powersgd.attach(module, names["options"])
    criterion = nn.MSELoss()
    return names | modules | {"criterion": criterion, "noise": names["batch"], "real": 1.0}


class _Sam(torch.optim.SGD):
    """SGD with the two steps of sharpness-aware minimization, as the usual library names them."""

    def first_step(self, zero_grad: bool) -> None:
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self.climbed = [0.05 * p.grad / p.grad.norm() for p in self.parameters]
        torch._foreach_add_([p.data for p in self.parameters], self.climbed)
        if zero_grad:
            self.zero_grad()

    def second_step(self, zero_grad: bool) -> None:
        torch._foreach_sub_([p.data for p in self.parameters], self.climbed)
        self.step()
        if zero_grad:
            self.zero_grad()


def sam() -> Names:
    """An attached module and an optimizer that takes two backward passes in a step."""
    names = attached()
    return names | {"optimizer": _Sam(names["ddp"].parameters(), lr=0.1)}


def zero() -> Names:
    """The names that an optimizer needs that overlaps with DDP."""
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
    from torch.distributed.optim import ZeroRedundancyOptimizer

    names = ddp() | {"ZeroRedundancyOptimizer": ZeroRedundancyOptimizer}
    return names | {"hook_with_zero_step": hook_with_zero_step}


def mesh() -> Names:
    """A model in layers, and the functions that shard it, on four ranks."""
    from torch.distributed.fsdp import fully_shard

    names = group() | {"init_device_mesh": init_device_mesh, "fully_shard": fully_shard}
    model = names["model"]
    model.layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    return names


def _beside_replicas(dim: str) -> DeviceMesh:
    """A mesh of two replicas, whose gradients are compressed, and of another dimension."""
    return mesh_of(("cpu:powersgd", torch_powersgd.Options(**OPTIONS)), (dim, 2))


def tensor_parallel() -> Names:
    """A mesh of replicas and tensor parallelism, on four ranks."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    names = mesh() | {"parallelize_module": parallelize_module}
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return names | {"mesh": _beside_replicas("tensor"), "plan": plan}


def pipeline() -> Names:
    """A mesh of replicas and pipeline stages, on four ranks."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    names = group() | {"PipelineStage": PipelineStage, "ScheduleGPipe": ScheduleGPipe}
    made = _beside_replicas("stage")
    first = made.get_local_rank("stage") == 0
    return names | {
        "mesh": made,
        "stage_module": nn.Linear(WIDTH, WIDTH),
        "n_microbatches": 2,
        "micro_input": torch.empty(4, WIDTH, requires_grad=not first),
        "micro_output": torch.empty(4, WIDTH, requires_grad=True),
        "batch": torch.randn(8, WIDTH),
        "loss_fn": nn.MSELoss(),
        "target": torch.randn(8, WIDTH),
    }


def replicas() -> Names:
    """An attached model on a mesh of replicas and shards, on four ranks."""
    names = mesh()
    model = names["fully_shard"](names["model"], mesh=_beside_replicas("shard"))
    return names | {"compression": torch_powersgd.attach(model)}


def by_hand() -> Names:
    """A model whose gradients nothing averages, and its optimizer."""
    names = group()
    return names | {"optimizer": torch.optim.SGD(names["model"].parameters(), lr=0.1)}


_MADE = (group, ddp, attached, gan, sam, zero, mesh, replicas, tensor_parallel, pipeline, by_hand)
PREAMBLES: dict[str, Callable[[], Names]] = {made.__name__: made for made in _MADE}
