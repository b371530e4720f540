# SPDX-License-Identifier: BSD-3-Clause
"""What every kind of gradients has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_powersgd._core import _C
from torch_powersgd.group_backends import global_ranks

ALREADY_ATTACHED = (
    "this module is already attached: use the Compression that attach returned, or call its "
    "detach() first"
)


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

    def index(self) -> dict[torch.Tensor, int]:
        """Returns the place of each parameter among the gradients."""
        return {parameter: i for i, parameter in enumerate(self.parameters().values())}

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns tensors with the shapes, dtypes and devices that are all-reduced."""
        return self.parameters()

    def family(self) -> Collection[str]:
        """Returns the names of all parameters that share the options, if others do as well."""
        return self.gradients().keys()

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


def shard_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this process's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def largest_mesh(tensors: Iterable[torch.Tensor]) -> DeviceMesh | None:
    """Returns the mesh with the most dimensions that a DTensor is on, if there is any."""
    meshes = (tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)


def shard_in(mesh: DeviceMesh | None, group: dist.ProcessGroup) -> str:
    """Returns the name of this process's part, by its place in a mesh without the replicas."""
    if mesh is None:
        return ""
    replicas = list(global_ranks(group))
    index, count = 0, 1
    for i, place in enumerate(mesh.get_coordinate() or []):
        if dist.get_process_group_ranks(mesh.get_group(i)) != replicas:
            index, count = index * mesh.size(i) + place, count * mesh.size(i)
    return f"shard {index} of {count}" if count > 1 else ""
