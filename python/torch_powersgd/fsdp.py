# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a module that FSDP2 has sharded or replicated: units, shards and replicas.

A unit is a module, or a list of modules, that ``fully_shard`` or ``replicate`` was called with.
FSDP2 keeps its parameters in a group. Each parameter's shard is a matrix of some of its rows,
padded to the same number on every rank. FSDP2 replicates by itself where a module's mesh has a
dimension of replicas. The private parts of torch that this file uses are the same in torch 2.11 to
2.14, except the attribute that ``groups_of`` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

LARGEST_SEARCHED = 16  # parameters of a unit, so 65 536 subsets


def group_of(module: FSDPModule, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group of the replicas. It raises a ValueError if none is known."""
    own = own_replicas(module)
    if own is not None:
        if group is not None and group is not own:
            raise ValueError(
                "group must be left out or be the replicas' group of this module's own mesh"
            )
        return own
    if group is not None:
        return group
    check_module(module)
    raise ValueError(
        "attach needs the replicas' process group for an FSDP2 module: "
        'attach(module, group=mesh.get_group("replicate"))'
    )


def own_replicas(module: FSDPModule) -> dist.ProcessGroup | None:
    """Returns the group of the replicas in the module's mesh, if its mesh has that dimension."""
    units = units_of(module)
    return _replicas_of(groups_of(units[0])[0]) if units else None


def check_module(module: FSDPModule) -> None:
    """Raises a ValueError if the gradients of the units cannot be compressed over replicas here."""
    check_units(module)
    if own_replicas(module) is None and place_of(module)["of"] == dist.get_world_size():
        raise ValueError(
            "this module is sharded over all ranks and has no replicas, so FSDP2 all-reduces no "
            "gradients and there is nothing to compress"
        )


def check_units(module: FSDPModule) -> None:
    """Raises a ValueError if the gradients of the units cannot be compressed."""
    own = own_replicas(module)
    for unit in units_of(module):
        groups = groups_of(unit)
        if len(groups) > 1:
            raise ValueError(
                "attach does not work with a module whose parameters are on several meshes"
            )
        if _replicas_of(groups[0]) is not own:
            raise ValueError(
                "attach does not work with FSDP2 units that have different groups of replicas"
            )


def parameters_of(module: FSDPModule) -> dict[str, torch.Tensor]:
    """Returns the trainable parameters, as the optimizer holds them."""
    return {name: shard.sharded_param for _, name, shard in trainable(module)}


def shards_of(module: FSDPModule) -> dict[str, torch.Tensor]:
    """Returns a tensor without data for the shard of each trainable parameter.

    It has the shard's padded size, its device, and the dtype of the gradients in the all-reduce.
    """
    return {
        name: torch.empty((), dtype=_reduced_dtype(shard), device=group.device)
        .expand(shard.padded_sharded_param_size)
        .requires_grad_()
        for group, name, shard in trainable(module)
    }


def place_of(module: FSDPModule) -> dict[str, Any]:
    """Returns this rank's coordinate in the parameters' mesh, and the number of coordinates.

    Ranks hold the same shards if and only if their coordinates are equal. Tensor parallelism adds a
    dimension to the mesh of the parameters that it splits. A module whose own mesh names the
    replicas has no coordinate: there is nothing to check.
    """
    assert isinstance(module, torch.nn.Module)
    meshes = [p.device_mesh for p in module.parameters() if isinstance(p, DTensor)]
    if not meshes or own_replicas(module) is not None:
        return {"coordinate": [], "of": 0}
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    return {"coordinate": list(mesh.get_coordinate() or []), "of": mesh.size()}


def compare_places(everyone: list[dict[str, Any]]) -> str:
    """Returns an error message if ranks of a group hold different shards, or an empty string."""
    for rank, place in enumerate(everyone):
        if place != everyone[0]:
            return (
                "group must be the replicas of this module, the ranks that hold the same shard, "
                f"but its rank 0 holds shard {everyone[0]['coordinate']} and its rank {rank} holds "
                f"shard {place['coordinate']}. Pass the group of the other mesh dimension, such as "
                'mesh.get_group("replicate")'
            )
    return ""


def units_of(module: FSDPModule) -> list[Any]:
    """Returns the first module of each unit, the root first."""
    assert isinstance(module, torch.nn.Module)
    firsts: dict[int, Any] = {}  # The modules of a unit share its state.
    for m in module.modules():
        if isinstance(m, FSDPModule) and groups_of(m):
            firsts.setdefault(id(m._get_fsdp_state()), m)
    return list(firsts.values())


def groups_of(unit: FSDPModule) -> list[Any]:
    """Returns the unit's groups of parameters, one in most cases."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13 and later have it.
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def _replicas_of(group: Any) -> dist.ProcessGroup | None:
    replicas: dist.ProcessGroup | None = getattr(group.mesh_info, "replicate_process_group", None)
    return replicas


def packed(group: Any) -> list[Any]:
    """Returns the group's shards, in the order of their gradients in the all-reduce."""
    shards = list(group.fsdp_params)
    # torch 2.15 and later order them by the gradients' dtype, once the module has run.
    order = getattr(group, "_reduce_scatter_param_indices", range(len(shards)))
    return [shards[i] for i in order]


def only_subset(sizes: Sequence[int], total: int) -> list[int]:
    """Returns the indices of the only sizes that add up to ``total``, or none.

    There are none if several subsets add up, or if there are too many sizes to try every subset.
    """
    if sum(sizes) == total:
        return list(range(len(sizes)))
    if len(sizes) > LARGEST_SEARCHED:
        return []
    found: dict[int, list[int] | None] = {0: []}  # None: several subsets have this sum.
    for i, size in enumerate(sizes):
        for before, subset in list(found.items()):
            if before + size <= total:
                known = subset is not None and before + size not in found
                found[before + size] = [*subset, i] if known and subset is not None else None
    return found.get(total) or []


def trainable(module: FSDPModule) -> list[tuple[Any, str, Any]]:
    """Returns group, name and shard of each trainable parameter."""
    assert isinstance(module, torch.nn.Module)
    prefix = {id(m): f"{name}." if name else "" for name, m in module.named_modules()}
    found = []
    for unit in units_of(module):
        for group in groups_of(unit):
            for shard in group.fsdp_params:
                info = shard._module_info
                if shard.sharded_param.requires_grad:
                    found.append((group, prefix[id(info.module)] + info.param_name, shard))
    return found


def _reduced_dtype(shard: Any) -> torch.dtype:
    policy = shard.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or shard.sharded_param.dtype
    return dtype
