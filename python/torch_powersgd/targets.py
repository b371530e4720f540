# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of gradients that ``attach`` takes: of a DDP module, of an FSDP2 module, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import ddp, fsdp, fsdp_hooks
from torch_powersgd._core import _C
from torch_powersgd.group_backends import global_ranks, group_or_default
from torch_powersgd.option_values import is_unicode, must_be, require


class Target(ABC):
    """The gradients that one call of ``attach`` compresses."""

    module: torch.nn.Module | None = None
    nothing: str = ""  # the message of the error if there are no gradients

    @abstractmethod
    def group(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """Returns the group to average over. It raises a ValueError if it is not known."""

    @abstractmethod
    def check(self) -> None:
        """Raises a ValueError if the gradients cannot be compressed."""

    def check_hook(self) -> None:  # noqa: B027
        """Raises a ValueError if ``register`` cannot register the hooks."""

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """Returns the trainable parameters, as an optimizer holds them."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns tensors with the shapes, dtypes and devices that are all-reduced."""
        return self.parameters()

    def place(self) -> dict[str, Any]:
        """Returns the part of the gradients that this process holds, in JSON types."""
        return {}

    def shard(self, group: dist.ProcessGroup) -> str:
        """Returns the name of that part in a checkpoint. It is empty if there is one part."""
        return ""

    def advice(self, gradient_bytes: int) -> str:
        """Returns what would make averaging that many bytes faster, or nothing."""
        return ""

    def register(self, reducer: _C.BucketReducer, group: dist.ProcessGroup) -> None:  # noqa: B027
        """Registers the hooks, if any, that hand the gradients to ``reducer``."""


def target_of(given: object) -> Target:
    """Returns the kind of the first argument of ``attach``.

    Raises:
        ValueError: If it is of no known kind.
    """
    if isinstance(given, DistributedDataParallel):
        return DdpTarget(given)
    if isinstance(given, FSDPModule):
        return FsdpTarget(given)
    if isinstance(given, Mapping):
        return NamedTensors(given)
    raise must_be(
        "target",
        "a DistributedDataParallel module, a module that fully_shard or replicate was called with, "
        "or a dict of named tensors",
        type(given),
    )


class DdpTarget(Target):
    """The buckets of a DDP module."""

    nothing = (
        "this module shows no trainable parameters. A tensor-parallel module in DDP hides them "
        "from its first forward pass on: attach it before that"
    )

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module: DistributedDataParallel = module

    def group(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        own: dist.ProcessGroup = self.module.process_group
        if given is not None and given is not own:
            raise ValueError("leave group out: a DDP module has its own process group")
        return own

    def check(self) -> None:
        ddp.check_module(self.module)

    def check_hook(self) -> None:
        ddp.check_hook(self.module)

    def parameters(self) -> dict[str, torch.Tensor]:
        return ddp.parameters_of(self.module)

    def shard(self, group: dist.ProcessGroup) -> str:
        mesh = getattr(self.module, "device_mesh", None)
        if mesh is None or not mesh.mesh_dim_names:
            return ""
        # The other dimensions split the tensors (tensor parallelism) or the layers (a pipeline).
        whole = mesh._get_root_mesh()
        known = mesh.mesh_dim_names[0] in (whole.mesh_dim_names or ())
        return _shard_name(whole, group) if known else ""

    def advice(self, gradient_bytes: int) -> str:
        return ddp.bucket_advice(self.module, gradient_bytes)

    def register(self, reducer: _C.BucketReducer, group: dist.ProcessGroup) -> None:
        ddp.register_hook(self.module, reducer)


class FsdpTarget(Target):
    """The shards of a module that ``fully_shard`` or ``replicate`` was called with."""

    nothing = "this module has no trainable parameters"

    def __init__(self, module: FSDPModule) -> None:
        self.module: Any = module  # an nn.Module as well

    def group(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        return fsdp.group_of(self.module, given)

    def check(self) -> None:
        fsdp.check_module(self.module)
        fsdp_hooks.check_hooks(self.module)

    def parameters(self) -> dict[str, torch.Tensor]:
        return fsdp.parameters_of(self.module)

    def gradients(self) -> dict[str, torch.Tensor]:
        return fsdp.shards_of(self.module)

    def place(self) -> dict[str, Any]:
        return fsdp.place_of(self.module)

    def shard(self, group: dist.ProcessGroup) -> str:
        meshes = [p.device_mesh for p in self.module.parameters() if isinstance(p, DTensor)]
        return _name_by(meshes, group)

    def register(self, reducer: _C.BucketReducer, group: dist.ProcessGroup) -> None:
        fsdp_hooks.set_hooks(self.module, reducer, group.size())


def _name_by(meshes: Sequence[DeviceMesh], group: dist.ProcessGroup) -> str:
    """Returns the name of this process's part, by the mesh with the most dimensions."""
    return _shard_name(max(meshes, key=lambda mesh: mesh.ndim), group) if meshes else ""


def _shard_name(mesh: DeviceMesh, group: dist.ProcessGroup) -> str:
    """Returns the name of this process's part, by its place in a mesh without the replicas."""
    replicas = list(global_ranks(group))
    index, count = 0, 1
    for i, place in enumerate(mesh.get_coordinate() or []):
        if dist.get_process_group_ranks(mesh.get_group(i)) != replicas:
            index, count = index * mesh.size(i) + place, count * mesh.size(i)
    return f"shard {index} of {count}" if count > 1 else ""


class NamedTensors(Target):
    """Tensors by name, which ``Compression.all_reduce`` averages."""

    nothing = "attach needs at least one tensor, got an empty dict"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.meshes = [t.device_mesh for t in tensors.values() if isinstance(t, DTensor)]

    def group(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        return group_or_default(given)

    def check(self) -> None:
        for name, tensor in self.tensors.items():
            is_text = isinstance(name, str) and is_unicode(name)
            require(is_text, "tensor names", "strings", name)
            is_dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
            require(is_dense, repr(name), "a dense tensor", tensor)
            fits = tensor.is_floating_point() or tensor.is_complex()
            require(fits, repr(name), "floating-point or complex", tensor.dtype)

    def parameters(self) -> dict[str, torch.Tensor]:
        # Without memory, because the core would keep the caller's tensors alive.
        shards = {name: shard_of(tensor) for name, tensor in self.tensors.items()}
        return {
            name: shard.new_empty(()).expand(shard.shape).requires_grad_()
            for name, shard in shards.items()
        }

    def shard(self, group: dist.ProcessGroup) -> str:
        return _name_by(self.meshes, group)


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
