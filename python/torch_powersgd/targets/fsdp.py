# SPDX-License-Identifier: BSD-3-Clause
"""The shards of a module that FSDP2 has sharded or replicated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from torch_powersgd._core import _C
from torch_powersgd.targets.fsdp_hooks import check_hooks, set_hooks
from torch_powersgd.targets.fsdp_units import (
    groups_of,
    own_replicas,
    replicas_of,
    trainable,
    units_of,
)
from torch_powersgd.targets.target import Target, largest_mesh, shard_in


class FsdpTarget(Target):
    """The shards of a module that ``fully_shard`` or ``replicate`` was called with."""

    nothing = "this module has no trainable parameters"

    def __init__(self, module: FSDPModule) -> None:
        self.module: Any = module  # an nn.Module as well

    def group(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        own = own_replicas(self.module)
        if own is not None:
            if given is not None and given is not own:
                raise ValueError(
                    "group must be left out or be the replicas' group of this module's own mesh"
                )
            return own
        if given is not None:
            return given
        self.check_module()
        raise ValueError(
            "attach needs the replicas' process group for an FSDP2 module: "
            'attach(module, group=mesh.get_group("replicate"))'
        )

    def check(self) -> None:
        self.check_module()
        check_hooks(self.module)

    def check_module(self) -> None:
        """Raises a ValueError if the units cannot be compressed, or there are no replicas."""
        self.check_units()
        if own_replicas(self.module) is None and self.place()["of"] == dist.get_world_size():
            raise ValueError(
                "this module is sharded over all ranks and has no replicas, so FSDP2 all-reduces "
                "no gradients and there is nothing to compress. To shard it within each host, and "
                f"replicate it over the hosts, call\n{_hybrid_lines(self.gradients())}"
            )

    def check_units(self) -> None:
        """Raises a ValueError if the gradients of the units cannot be compressed."""
        own = own_replicas(self.module)
        for unit in units_of(self.module):
            groups = groups_of(unit)
            if len(groups) > 1:
                raise ValueError(
                    "attach does not work with a module whose parameters are on several meshes"
                )
            if replicas_of(groups[0]) is not own:
                raise ValueError(
                    "attach does not work with FSDP2 units that have different groups of replicas"
                )

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: shard.sharded_param for _, name, shard in trainable(self.module)}

    def gradients(self) -> dict[str, torch.Tensor]:
        # Without data, in the padded sizes and the dtypes of the all-reduce.
        return {
            name: torch.empty((), dtype=_reduced_dtype(shard), device=group.device)
            .expand(shard.padded_sharded_param_size)
            .requires_grad_()
            for group, name, shard in trainable(self.module)
        }

    def place(self) -> dict[str, Any]:
        """Returns this rank's coordinate in the parameters' mesh, and the number of coordinates.

        Ranks hold the same shards if and only if their coordinates are equal. Tensor parallelism
        adds a dimension to the mesh of the parameters that it splits. A module whose own mesh names
        the replicas has no coordinate: there is nothing to check.
        """
        mesh = largest_mesh(self.module.parameters())
        if mesh is None or own_replicas(self.module) is not None:
            return {"coordinate": [], "of": 0}
        return {"coordinate": list(mesh.get_coordinate() or []), "of": mesh.size()}

    def shard(self, group: dist.ProcessGroup) -> str:
        return shard_in(largest_mesh(self.module.parameters()), group)

    def register(self, reducer: _C.BucketReducer, group: dist.ProcessGroup) -> None:
        set_hooks(self.module, reducer, group.size())


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


def _hybrid_lines(gradients: Mapping[str, torch.Tensor]) -> str:
    """Returns the code that shards a module within each host, with numbers if torchrun has them."""
    device = next((gradient.device.type for gradient in gradients.values()), "cuda")
    world, local = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    known = 1 < local < world and world % local == 0
    sizes = f"{world // local}, {local}" if known else "hosts, devices_per_host"
    return (
        f'    mesh = init_device_mesh("{device}", ({sizes}), '
        'mesh_dim_names=("replicate", "shard"), '
        f'backend_override={{"replicate": "{device}:powersgd"}})\n'
        "    fully_shard(model, mesh=mesh)"
    )


def _reduced_dtype(shard: Any) -> torch.dtype:
    policy = shard.mp_policy
    dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or shard.sharded_param.dtype
    return dtype
