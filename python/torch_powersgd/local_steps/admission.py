# SPDX-License-Identifier: BSD-3-Clause
"""Admits a model and its optimizers to local steps: what is passed fits, and on all processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_powersgd import agreement
from torch_powersgd._core import _C
from torch_powersgd.agreement import Compare, equality_of
from torch_powersgd.group_backends import group_or_default
from torch_powersgd.local_steps import averaging
from torch_powersgd.local_steps.averaging import known_ranks, same_processes
from torch_powersgd.local_steps.fragment import Tensors, reshard
from torch_powersgd.local_steps.rounds import Found
from torch_powersgd.local_steps.schedule import Schedule, split
from torch_powersgd.local_steps.watch import takes_local_steps
from torch_powersgd.optimizer_steps import parameters_of
from torch_powersgd.option_values import require
from torch_powersgd.proposal import described, first_difference
from torch_powersgd.sparse import check_density
from torch_powersgd.targets import shard_of
from torch_powersgd.targets.ddp import in_local_steps
from torch_powersgd.targets.fsdp_units import own_replicas


@dataclass(frozen=True)
class Arguments:
    """The arguments of ``LocalSGD`` or ``DiLoCo``, as they were given.

    Attributes:
        check_trained: Raises a ValueError if other arguments don't fit these parameters.
    """

    model: torch.nn.Module
    optimizers: Sequence[Optimizer]
    schedule: Schedule
    average_buffers: bool
    density: float | None
    group: dist.ProcessGroup | None
    scaler: torch.amp.GradScaler | None
    check_trained: Callable[[Tensors], None]


def agree(function: str, arguments: Arguments) -> Found:
    """Returns what takes local steps, once all processes have passed the same. Collective.

    Raises:
        ValueError: On every process, if an argument is not valid or differs.
    """
    group = group_or_default(arguments.group)

    def make() -> tuple[Found, dict[str, Any]]:
        found = _find(arguments, group)
        numbers = {
            **dataclasses.asdict(arguments.schedule),
            "number of buffers": len(found.buffers),
            "density": arguments.density,
        }
        return found, {**numbers, "tensors": described(found.shared)}

    return agreement.agree(group, function, make, _comparison(function))[0]


def _comparison(function: str) -> Compare:
    def compare(everyone: list[dict[str, Any]]) -> str:
        for rank, given in enumerate(everyone):
            if differing := first_difference(everyone[0]["tensors"], given["tensors"]):
                first, mine = differing
                return (
                    f"all ranks must pass the same model to {function}, but rank 0 has {first} "
                    f"where rank {rank} has {mine}"
                )
        return equality_of(f"the arguments of {function}")(everyone)

    return compare


def _find(arguments: Arguments, group: dist.ProcessGroup) -> Found:
    model, schedule = arguments.model, arguments.schedule
    for name, kind, text in (
        ("model", torch.nn.Module, "a torch.nn.Module"),
        ("scaler", torch.amp.GradScaler | None, "a torch.amp.GradScaler"),
        ("average_buffers", bool, "a bool"),
    ):
        value = getattr(arguments, name)
        require(isinstance(value, kind), name, text, type(value))
    _check_optimizers(arguments.optimizers)
    schedule.check()
    if (density := arguments.density) is not None:
        check_density(density)
        devices = sorted({str(p.device) for p in model.parameters() if p.requires_grad})
        one = "None if the parameters are on several devices"
        require(len(devices) <= 1, "density", f"{one} ({', '.join(devices)})", density)
    _check_averages(model, group)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    reshard(module)
    _check_not_split(module, arguments.optimizers, group)
    everything = dict(module.named_parameters())
    trained = {name: p for name, p in everything.items() if p.requires_grad and p.numel()}
    most = f"at most {len(trained)}, the number of trainable parameters"
    require(schedule.fragments <= len(trained), "fragments", most, schedule.fragments)
    _check_held(arguments.optimizers, trained)
    arguments.check_trained(trained)
    if name := takes_local_steps(trained):
        raise ValueError(
            f"{name!r} already takes local steps: call detach() on them first. To train a model "
            "with several optimizers, pass them as a list: LocalSGD(model, [one, other], ...)"
        )
    kept = module.state_dict(keep_vars=True)
    buffers = dict(module.named_buffers())
    floating = [name for name, b in buffers.items() if name in kept and b.is_floating_point()]
    return Found(
        group,
        module,
        trained,
        split(trained, schedule.fragments),
        floating if arguments.average_buffers else [],
        {name: shard_of(tensor.detach()) for name, tensor in (everything | buffers).items()},
    )


def _check_optimizers(optimizers: Sequence[Any]) -> None:
    wanted = "a torch.optim.Optimizer or a list of them"
    require(len(optimizers) > 0, "optimizer", wanted, [])
    for i, optimizer in enumerate(optimizers):
        require(isinstance(optimizer, Optimizer), "optimizer", wanted, type(optimizer))
        if any(other is optimizer for other in optimizers[:i]):
            raise ValueError(
                f"optimizer must not list the same {type(optimizer).__name__} twice, for it takes "
                "one step at a time"
            )


def _check_held(optimizers: Sequence[Optimizer], trained: Tensors) -> None:
    """Raises a ValueError if the steps of an optimizer don't train the model."""
    parameters = {*trained.values()}
    for optimizer in optimizers:
        if parameters.isdisjoint(parameters_of(optimizer)):
            raise ValueError(
                "optimizer must hold trainable parameters of the model, but "
                f"{type(optimizer).__name__} holds none of them. One that holds copies, such as "
                "float32 masters, would undo each average"
            )


def _check_averages(model: torch.nn.Module, group: dist.ProcessGroup) -> None:
    """Raises a ValueError if the model averages gradients in a way that can't be stopped."""
    for module in model.modules():
        if isinstance(module, FSDPModule) and same_processes(own_replicas(module), group):
            raise ValueError(
                "FSDP2 averages gradients over the replicas in this module's mesh at every step. "
                "For local steps, call fully_shard with the mesh of the shards alone "
                '(mesh["shard"])'
            )
    if not isinstance(model, DistributedDataParallel):
        return
    if model not in in_local_steps and _C.is_attached(model.reducer):
        raise ValueError(
            "this module is attached, but local steps do their own compression: leave attach out, "
            "or call detach() first"
        )
    if same_processes(model.process_group, group):
        averaging.check(model)


def _check_not_split(
    model: torch.nn.Module, optimizers: Sequence[Optimizer], group: dist.ProcessGroup
) -> None:
    """Raises a ValueError if processes of the group hold different parts of the model."""
    others = known_ranks().get(group, {}).keys() - {dist.get_rank()}
    for what, over in _splits(model, optimizers):
        if others & known_ranks().get(over, {}).keys():
            raise ValueError(
                f"{what} is split over processes of this group, but each must be able to train on "
                "its own: pass as group one process of each replica"
            )


def _splits(
    model: torch.nn.Module, optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, dist.ProcessGroup | None]]:
    """What is split between processes, and over which group."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            for i, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    yield repr(name), parameter.device_mesh.get_group(i)
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            yield "FullyShardedDataParallel", module.process_group
    for optimizer in optimizers:
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            yield "ZeroRedundancyOptimizer", optimizer.process_group
