# SPDX-License-Identifier: BSD-3-Clause
"""The all-reduce between the replicas of a module that FSDP2 has sharded or replicated.

FSDP2 reduce-scatters the gradients of a unit inside a replica, into one flat tensor. If its mesh
has no dimension of replicas, it then calls the unit's all-reduce hook with this tensor. Else it
all-reduces the tensor by itself, in ``BackendPowerSGD.allreduce``, which has to know the unit. The
unit's reduce-scatter, which allocates the tensor, announces it to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from torch_powersgd._core import _C
from torch_powersgd.fsdp import groups_of, own_replicas, packed, trainable, units_of


def set_hooks(module: FSDPModule, model: _C.AttachedModel, replicas: int) -> None:
    """Sets the hooks of the units. The parameters of ``model`` are ``shards_of(module)``."""
    number_of = {id(shard): i for i, (_, _, shard) in enumerate(trainable(module))}
    passes = _Passes(model.end_step)
    native = own_replicas(module) is not None
    for bucket, unit in enumerate(units_of(module)):
        mine = _Unit(model, bucket, groups_of(unit)[0], number_of, passes)
        if native:
            unit.set_custom_reduce_scatter(_Announcer(mine))
        else:
            unit.set_all_reduce_hook(_AllReduce(mine, replicas))


class _Unit:
    """One unit of an attached module."""

    def __init__(
        self,
        model: _C.AttachedModel,
        bucket: int,
        group: Any,
        number_of: dict[int, int],
        passes: _Passes,
    ) -> None:
        self.model, self.bucket, self.group = model, bucket, group
        self.number_of, self.passes = number_of, passes

    @property
    def all_reduces(self) -> bool:
        """False after the user's set_requires_all_reduce(False)."""
        requires: bool = self.group.all_reduce_grads
        return requires

    def numbers(self, gradients: torch.Tensor) -> list[int]:
        """Returns the parameters that the tensor holds, or none if they are not known."""
        shards = [p for p in packed(self.group) if p.sharded_param.requires_grad]
        numel = sum(shard.padded_sharded_param_size.numel() for shard in shards)
        known = numel == gradients.numel() and all(id(shard) in self.number_of for shard in shards)
        return [self.number_of[id(shard)] for shard in shards] if known else []


class _AllReduce:
    """The all-reduce hook of one unit."""

    def __init__(self, unit: _Unit, replicas: int) -> None:
        self.unit, self.replicas = unit, replicas
        self.partial: torch.Tensor | None = None

    def __call__(self, gradients: torch.Tensor) -> None:
        unit = self.unit
        if not unit.all_reduces:
            self.partial = gradients.clone() if self.partial is None else self.partial + gradients
            gradients.zero_()
            return
        if self.partial is not None:
            gradients += self.partial
            self.partial = None
        if not gradients.is_cpu:
            # FSDP2 keeps the tensor until this stream is done only for its own all-reduce.
            gradients.record_stream(torch.accelerator.current_stream(gradients.device))
        unit.passes.enter()
        numbers = unit.numbers(gradients)
        unit.model.reduce(unit.bucket, gradients, numbers, self.replicas).wait()


class _Announcer:
    """The reduce-scatter of one unit, which announces the all-reduce after it to the model."""

    def __init__(self, unit: _Unit) -> None:
        self.unit = unit
        self.reduce_scatter = unit.group._reduce_scatter_comm

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a tensor for the input or the output of the reduce-scatter.

        FSDP2 asks for the input first. It all-reduces the output at once, and never the input.
        """
        tensor: torch.Tensor = self.reduce_scatter.allocate(size, dtype=dtype, device=device)
        unit = self.unit
        if unit.all_reduces:
            unit.passes.enter()
            divided = _divided_after(unit.group, dtype)
            unit.model.expect(unit.bucket, tensor, unit.numbers(tensor), divided)
        return tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reduce_scatter(*args, **kwargs)


def _divided_after(group: Any, dtype: torch.dtype) -> float:
    """Returns the number by which FSDP2 divides the result of its all-reduce."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    sharded = hasattr(group.mesh_info, "shard_mesh_size")
    _, divided, _, _ = _get_gradient_divide_factors(
        group._reduce_scatter_process_group if sharded else None,
        group._all_reduce_process_group,
        dtype,
        group.device.type,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )
    return divided or 1.0


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
