# SPDX-License-Identifier: BSD-3-Clause
"""Tensors by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist

from torch_powersgd.group_backends import group_or_default
from torch_powersgd.option_values import is_unicode, require
from torch_powersgd.targets.target import Target, largest_mesh, shard_in, shard_of


class TensorsByName(Target):
    """Tensors by name, which ``Compression.all_reduce`` averages.

    Args:
        tensors: The tensors.
        family: Names of all tensors that share the options. None: of these.
    """

    nothing = "attach needs at least one tensor, got an empty dict"

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], family: Collection[str] | None = None
    ) -> None:
        self.tensors = tensors
        self._family = tensors.keys() if family is None else family

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

    def family(self) -> Collection[str]:
        return self._family

    def shard(self, group: dist.ProcessGroup) -> str:
        return shard_in(largest_mesh(self.tensors.values()), group)
