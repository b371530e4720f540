# SPDX-License-Identifier: BSD-3-Clause
"""The all-reduce between replicas of a module that FSDP2 has sharded (hybrid sharding, HSDP).

FSDP2 reduce-scatters the gradients of each of its units inside a replica. It then calls the unit's
all-reduce hook with this rank's shards of them in one flat tensor. Each parameter's shard is a
matrix of some of its rows, padded to the same number on every rank. The private parts of torch that
this file uses are the same in torch 2.11 and 2.13, except the attribute that ``_groups_of`` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torch_powersgd import log
from torch_powersgd._core import _C


def group_of(module: FSDPModule, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the given group of the replicas. It raises a ValueError if there is none."""
    if group is not None:
        return group
    check_module(module)
    raise ValueError(
        "attach needs the group of the replicas of a module that FSDP2 has sharded: "
        'attach(module, group=mesh.get_group("replicate"))'
    )


def check_module(module: FSDPModule) -> None:
    """Raises a ValueError if the units cannot take our hooks, or there are no replicas."""
    for unit in _units(module):
        groups = _groups_of(unit)
        if len(groups) > 1:
            raise ValueError("attach does not work with parameters of one module on several meshes")
        if hasattr(groups[0].mesh_info, "replicate_process_group"):
            raise ValueError(
                "this module's mesh has a dimension of replicas, between which FSDP2 all-reduces "
                'by itself: shard it by fully_shard(..., mesh=mesh["shard"])'
            )
        if groups[0]._all_reduce_hook is not None:
            raise ValueError("an all-reduce hook of this FSDP2 module is set already")
    if place_of(module)["of"] == dist.get_world_size():
        raise ValueError(
            "this module is sharded over all ranks and has no replicas: FSDP2 does not all-reduce "
            "its gradients, so there is nothing to compress"
        )


def shards_of(module: FSDPModule) -> dict[str, torch.Tensor]:
    """Returns a tensor without data for the shard of each trainable parameter.

    It has the shard's padded size, its device, and the dtype of the gradients in the all-reduce.
    """
    return {
        name: torch.empty((), dtype=_reduced_dtype(shard), device=group.device)
        .expand(shard.padded_sharded_param_size)
        .requires_grad_()
        for group, name, shard in _trainable(module)
    }


def shard_place(module: FSDPModule) -> list[int]:
    """Returns the index of this rank's shard and the number of shards."""
    info = _groups_of(_units(module)[0])[0].mesh_info
    return [info.shard_mesh_rank, info.shard_mesh_size]


def place_of(module: FSDPModule) -> dict[str, Any]:
    """Returns this rank's coordinate in the parameters' mesh, and the number of coordinates.

    Ranks hold the same shards if and only if their coordinates are equal. Tensor parallelism adds a
    dimension to the mesh of the parameters that it splits.
    """
    assert isinstance(module, torch.nn.Module)
    meshes = [p.device_mesh for p in module.parameters() if isinstance(p, DTensor)]
    if not meshes:
        return {"coordinate": [], "of": 0}
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    return {"coordinate": list(mesh.get_coordinate() or []), "of": mesh.size()}


def compare_places(everyone: list[dict[str, Any]]) -> str:
    """Returns nothing if all ranks of a group hold the same shards, else the error's message."""
    for rank, place in enumerate(everyone):
        if place != everyone[0]:
            return (
                "group must be the replicas of this module: ranks that hold the same shard. Rank 0 "
                f"of the given group holds shard {everyone[0]['coordinate']} and rank {rank} holds "
                f"shard {place['coordinate']}. Pass the group of the other dimension of the mesh, "
                'such as mesh.get_group("replicate")'
            )
    return ""


def set_hooks(module: FSDPModule, model: _C.AttachedModel, replicas: int) -> None:
    """Sets the hooks of the units. The parameters of ``model`` are ``shards_of(module)``."""
    number_of = {id(shard): i for i, (_, _, shard) in enumerate(_trainable(module))}
    passes = _Passes(model.end_step)
    for bucket, unit in enumerate(_units(module)):
        unit.set_all_reduce_hook(
            _Hook(model, bucket, _groups_of(unit)[0], number_of, replicas, passes)
        )


class _Hook:
    """The all-reduce hook of one unit."""

    def __init__(
        self,
        model: _C.AttachedModel,
        bucket: int,
        group: Any,
        number_of: dict[int, int],
        replicas: int,
        passes: _Passes,
    ) -> None:
        self.model, self.bucket, self.group, self.number_of = model, bucket, group, number_of
        self.replicas, self.passes = replicas, passes
        self.partial: torch.Tensor | None = None
        self.warned = False

    def __call__(self, gradients: torch.Tensor) -> None:
        if not self.group.all_reduce_grads:  # The user called set_requires_all_reduce(False).
            self.partial = gradients.clone() if self.partial is None else self.partial + gradients
            gradients.zero_()
            return
        if self.partial is not None:
            gradients += self.partial
            self.partial = None
        if not gradients.is_cpu:
            # FSDP2 keeps the tensor until this stream is done only for its own all-reduce.
            gradients.record_stream(torch.accelerator.current_stream(gradients.device))
        self.passes.enter()
        self.model.reduce(self.bucket, gradients, self._numbers(gradients), self.replicas).wait()

    def _numbers(self, gradients: torch.Tensor) -> list[int]:
        """Returns the parameters that the tensor holds, or none if they are not known."""
        shards = [p for p in _packed(self.group) if p.sharded_param.requires_grad]
        numel = sum(shard.padded_sharded_param_size.numel() for shard in shards)
        known = numel == gradients.numel() and all(id(shard) in self.number_of for shard in shards)
        if known:
            return [self.number_of[id(shard)] for shard in shards]
        if not self.warned:
            log.warning(
                "FSDP2 reduces some of a module's parameters only, which of them is not known: "
                "they are averaged exactly. With set_reduce_scatter_unused_params(True) it "
                "reduces all, and they are compressed"
            )
            self.warned = True
        return []


class _Passes:
    """Calls ``end`` when a backward pass ends in which ``enter`` was called."""

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        self.entered: int | None = None

    def enter(self) -> None:
        # An id and not a flag, because the end of a pass that failed is never called.
        current = torch._C._current_graph_task_id()
        if current != self.entered:
            self.entered = current
            torch.autograd.Variable._execution_engine.queue_callback(self.end)


def _units(module: FSDPModule) -> list[Any]:
    assert isinstance(module, torch.nn.Module)
    return [m for m in module.modules() if isinstance(m, FSDPModule) and _groups_of(m)]


def _groups_of(unit: FSDPModule) -> list[Any]:
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13 and later have it.
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _packed(group: Any) -> list[Any]:
    """Returns the group's shards, in the order of their gradients in the all-reduce."""
    shards = list(group.fsdp_params)
    # torch 2.15 and later order them by the gradients' dtype, once the module has run.
    order = getattr(group, "_reduce_scatter_param_indices", range(len(shards)))
    return [shards[i] for i in order]


def _trainable(module: FSDPModule) -> list[tuple[Any, str, Any]]:
    """Returns group, name and shard of each trainable parameter."""
    assert isinstance(module, torch.nn.Module)
    prefix = {id(m): f"{name}." if name else "" for name, m in module.named_modules()}
    found = []
    for unit in _units(module):
        for group in _groups_of(unit):
            for shard in group.fsdp_params:
                info = shard._module_info
                if shard.sharded_param.requires_grad:
                    found.append((group, prefix[id(info.module)] + info.param_name, shard))
    return found


def _reduced_dtype(shard: Any) -> torch.dtype:
    policy = shard.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or shard.sharded_param.dtype
    return dtype
