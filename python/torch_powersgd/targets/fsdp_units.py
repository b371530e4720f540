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

LARGEST_SEARCHED = 16  # parameters of a unit, so 65 536 subsets


def own_replicas(module: FSDPModule) -> dist.ProcessGroup | None:
    """Returns the group of the replicas in the module's mesh, if its mesh has that dimension."""
    units = units_of(module)
    return replicas_of(groups_of(units[0])[0]) if units else None


def units_of(module: FSDPModule) -> list[Any]:
    """Returns the first module of each unit, the root first."""
    assert isinstance(module, torch.nn.Module)
    firsts: dict[Any, Any] = {}  # The modules of a unit share its state.
    for m in module.modules():
        if isinstance(m, FSDPModule) and groups_of(m):
            firsts.setdefault(m._get_fsdp_state(), m)
    return list(firsts.values())


def groups_of(unit: FSDPModule) -> list[Any]:
    """Returns the unit's groups of parameters, one in most cases."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch 2.13 and later have it.
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group
    return [] if group is None else [group]


def replicas_of(group: Any) -> dist.ProcessGroup | None:
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
    prefix = {m: f"{name}." if name else "" for name, m in module.named_modules()}
    found = []
    for unit in units_of(module):
        for group in groups_of(unit):
            for shard in group.fsdp_params:
                info = shard._module_info
                if shard.sharded_param.requires_grad:
                    found.append((group, prefix[info.module] + info.param_name, shard))
    return found
