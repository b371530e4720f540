# SPDX-License-Identifier: BSD-3-Clause
"""The all-reduce between the replicas of a module that FSDP2 has sharded or replicated.

FSDP2 reduce-scatters a unit's gradients within a replica, into one flat tensor. If the mesh has no
dimension of replicas, FSDP2 then calls the unit's all-reduce hook with this tensor. Otherwise FSDP2
calls ``BackendPowerSGD.allreduce`` itself, which must know the unit. The unit's reduce-scatter,
which allocates the tensor, announces it to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from torch_powersgd._core import _C
from torch_powersgd.targets.fsdp_units import (
    groups_of,
    only_subset,
    own_replicas,
    packed,
    trainable,
    units_of,
)
from torch_powersgd.targets.target import ALREADY_ATTACHED


def set_hooks(module: FSDPModule, reducer: _C.BucketReducer, replicas: int) -> None:
    """Sets the hooks of the units. The parameters of ``reducer`` are the ``gradients`` of
    its ``FsdpTarget``."""
    number_of = {shard: i for i, (_, _, shard) in enumerate(trainable(module))}
    steps = _Steps(reducer.end_step)
    native = own_replicas(module) is not None
    buckets: dict[tuple[int, ...], int] = {}
    for unit in units_of(module):
        mine = _Unit(reducer, groups_of(unit)[0], number_of, buckets, steps)
        if native:
            unit.set_custom_reduce_scatter(_Announcer(mine))
        else:
            unit.set_all_reduce_hook(_AllReduce(mine, replicas))


def check_hooks(module: FSDPModule) -> None:
    """Raises a ValueError if the module is already attached or has another hook."""
    native = own_replicas(module) is not None
    for unit in units_of(module):
        group = groups_of(unit)[0]
        hook = group._reduce_scatter_comm if native else group._all_reduce_hook
        if isinstance(hook, (_AllReduce, _Announcer)):
            if not hook.unit.reducer.detached:
                raise ValueError(ALREADY_ATTACHED)
        elif hook is not None and not native:
            raise ValueError("this FSDP2 module already has an all-reduce hook")


class _Unit:
    """One unit of an attached module."""

    def __init__(
        self,
        reducer: _C.BucketReducer,
        group: Any,
        number_of: dict[Any, int],
        buckets: dict[tuple[int, ...], int],
        steps: _Steps,
    ) -> None:
        self.reducer, self.group, self.number_of = reducer, group, number_of
        self.buckets, self.steps = buckets, steps

    @property
    def all_reduces(self) -> bool:
        """False after the user's set_requires_all_reduce(False)."""
        requires: bool = self.group.all_reduce_grads
        return requires

    def numbers(self, gradients: torch.Tensor) -> list[int]:
        """Returns the parameters that the tensor holds, or none if they are not known.

        It holds the whole unit, or the modules whose backward pass has run. For example, a unit of
        a norm and an output layer is reduced in two parts if the loss calls the output layer alone.
        """
        shards = self._trainable()
        sizes = [shard.padded_sharded_param_size.numel() for shard in shards]
        held = [shards[i] for i in only_subset(sizes, gradients.numel())]
        known = all(shard in self.number_of for shard in held)
        return [self.number_of[shard] for shard in held] if known else []

    def all_numbers(self) -> list[int]:
        """Returns the parameters of the unit that are attached and trainable."""
        known = (self.number_of.get(shard) for shard in self._trainable())
        return [number for number in known if number is not None]

    def _trainable(self) -> list[Any]:
        return [shard for shard in packed(self.group) if shard.sharded_param.requires_grad]

    def bucket(self, numbers: list[int]) -> int:
        """Returns the number of the bucket of these parameters."""
        return self.buckets.setdefault(tuple(numbers), len(self.buckets))


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
            # FSDP2 keeps the tensor alive until this stream is done only for its own all-reduce.
            gradients.record_stream(torch.accelerator.current_stream(gradients.device))
        numbers = unit.numbers(gradients)
        unit.steps.enter(unit, numbers)
        unit.reducer.reduce(unit.bucket(numbers), gradients, numbers, self.replicas).wait()


class _Announcer:
    """The reduce-scatter of one unit, which announces the following all-reduce to the model."""

    def __init__(self, unit: _Unit) -> None:
        self.unit = unit
        current = unit.group._reduce_scatter_comm
        detached = isinstance(current, _Announcer)
        self.reduce_scatter = current.reduce_scatter if detached else current
        self.input: tuple[int, int] | None = None  # pass and size of the allocated input

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Returns a tensor for the input or the output of the reduce-scatter.

        FSDP2 allocates the input first. It all-reduces the output at once, and never the input.
        """
        tensor: torch.Tensor = self.reduce_scatter.allocate(size, dtype=dtype, device=device)
        unit = self.unit
        if self._is_output(tensor.numel()) and unit.all_reduces:
            numbers = unit.numbers(tensor)
            unit.steps.enter(unit, numbers)
            divided = _divided_after(unit.group, dtype)
            unit.reducer.expect(unit.bucket(numbers), tensor, numbers, divided)
        return tensor

    def _is_output(self, numel: int) -> bool:
        shards = getattr(self.unit.group.mesh_info, "shard_mesh_size", 1)
        # A failed pass may have allocated only the input.
        current = torch._C._current_graph_task_id()
        is_output = self.input == (current, numel * shards)
        self.input = None if is_output else (current, numel)
        return is_output

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


class _Steps:
    """Calls ``end`` when the last gradients of a step have been reduced.

    That is at the end of the backward pass that reduces them. A chunked loss runs backward through
    the output layer first, so one unit can take two passes. A pipeline's schedule reduces after its
    passes. A step that doesn't end with a pass ends when one of its units is reduced again.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        self.entered: int | None = None
        self.reduced: set[object] = set()
        self.rests: set[int] = set()
        self.waits = True  # False: a part was not followed by the rest, which is unused

    def enter(self, unit: _Unit, numbers: list[int]) -> None:
        """Notes that parameters of a unit are reduced, or the whole unit if none are named."""
        keys: set[object] = {*numbers} or {unit}
        # An id and not a flag, because the callback of a failed pass never runs.
        current = torch._C._current_graph_task_id()
        in_new_pass = current < 0 or current != self.entered
        if in_new_pass and keys & self.reduced:
            self.waits = not self.rests
            self._end()
        self.reduced |= keys
        self.rests |= {*unit.all_numbers()} if numbers else set()
        self.rests -= self.reduced
        if in_new_pass and current >= 0:
            self.entered = current
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_pass)

    def _end_of_pass(self) -> None:
        if not (self.waits and self.rests):
            self._end()

    def _end(self) -> None:
        self.reduced.clear()
        self.rests.clear()
        self.end()
