# SPDX-License-Identifier: BSD-3-Clause
"""The process group of torchft's manager, which compresses what is attached to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
import torchft
from torch._C._distributed_c10d import HashStore, Store, _DistributedBackendOptions
from torch.distributed.fsdp import FSDPModule
from torchft.local_sgd import DiLoCo
from torchft.process_group import ProcessGroupWrapper

from torch_powersgd import _backend
from torch_powersgd.compression import Compression
from torch_powersgd.group_backends import device_types
from torch_powersgd.integrations.torchft.attached import (
    Attached,
    AttachedDdp,
    AttachedFragment,
    AttachedShards,
)
from torch_powersgd.options import Options, lay_over, resolve

if TYPE_CHECKING:
    from torchft.manager import Manager


class ProcessGroupPowerSGD(ProcessGroupWrapper):
    """The process group of torchft's ``Manager``, which compresses what is attached to it.

    Everything else is exact. A new quorum keeps the residual of each replica that stays: what it
    has not sent yet is sent to the replicas of then. All take over the factors of one that has
    taken the most steps. A step that ``should_commit`` drops is undone: residual and factors become
    what they were before it, to the bit, at the cost of a copy of both (``allow_discard``).

    Args:
        timeout: Time that a collective or the making of a group may take.
        options: A complete ``Options``, or a mapping of some of its fields, which is laid over
            those of ``configure`` and the environment. ``scope`` is "attached" and
            ``allow_discard`` True in any case.

    Raises:
        ValueError: If the options are not valid.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(seconds=60),
        options: Options | Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(timeout)
        self._pg: dist.ProcessGroup | None
        chosen = lay_over(resolve(None), options, "options of ProcessGroupPowerSGD")
        self._options = dataclasses.replace(chosen, scope="attached", allow_discard=True)
        self._attached: list[Attached] = []

    @overload
    def attach(
        self, target: torchft.DistributedDataParallel | FSDPModule, manager: Manager
    ) -> Compression: ...

    @overload
    def attach(self, target: DiLoCo, manager: Manager) -> list[Compression]: ...

    def attach(
        self, target: torchft.DistributedDataParallel | FSDPModule | DiLoCo, manager: Manager
    ) -> Compression | list[Compression]:
        """Compresses what the replicas average, layer by layer.

        Every replica calls it before its first quorum, with the same targets in one order.

        Args:
            target: A ``DistributedDataParallel`` module of this package, made with this manager;
                one of torchft's class trains alike, until a replica leaves in a step. Or the root
                of a module that FSDP2 has sharded over the processes of one replica: its all-reduce
                hooks then average over the replicas. Or torchft's ``DiLoCo``, whose changes are
                compressed; a step of the options is a round of a fragment.
            manager: The manager whose process group this is.

        Returns:
            The handle of the compression, and of ``DiLoCo`` one for each fragment. Its
            ``state_dict`` needs ``per_rank=True``: without, it waits for replicas that may be gone.

        Raises:
            ValueError: If the target cannot be attached, or a quorum was there before.
        """
        if self._pg is not None:
            raise ValueError("attach must be called before the manager's first quorum")
        given: Any = target
        if isinstance(target, DiLoCo):
            kind, parts = AttachedFragment, target._fragments
        elif isinstance(target, torchft.DistributedDataParallel):
            kind, parts = AttachedDdp, [given]
        elif isinstance(target, FSDPModule):
            kind, parts = AttachedShards, [given]
        else:
            raise ValueError(
                "attach takes a DistributedDataParallel module or a DiLoCo of torchft, or a module "
                f"that fully_shard was called with, got {type(target).__name__}"
            )
        added = [kind(part, manager, self._alone(), self._leave) for part in parts]
        self._attached += added
        handles = [attached.compression for attached in added]
        return handles if isinstance(target, DiLoCo) else handles[0]

    def configure(self, *arguments: Any, **named: Any) -> None:
        """Makes the group of a new quorum, and moves what is attached there."""
        try:
            super().configure(*arguments, **named)
            for attached in self._attached:
                attached.move(self.parent)
        except Exception:
            self._leave()
            raise

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> dist.Work:
        """Sums the tensors over the replicas, compressed if they are attached."""
        op = getattr(opts, "reduceOp", opts)
        if len(tensors) == 1 and op == dist.ReduceOp.SUM:
            for attached in self._attached:
                work = attached.sum(tensors[0])
                if work is not None:
                    return work
        return super().allreduce(tensors, opts)

    def _leave(self) -> None:
        """Leaves the group after an error, so that no other replica waits for this one.

        A replica that has died is noticed by those that wait for it. The others wait for these.
        """
        group, self._pg = self._pg, None
        if group is not None:
            group.abort()
        for attached in self._attached:
            attached.move(self._alone())

    def _alone(self) -> dist.ProcessGroup:
        return _make_group(HashStore(), 0, 1, self._timeout, self._options)

    def shutdown(self) -> None:
        """Ends the group. ``abort`` may be called meanwhile from another thread."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()

    def getBackendName(self) -> str:
        return "torchft-powersgd"

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        return _make_group(store, rank, world_size, self._timeout, self._options)


def _make_group(
    store: Store, rank: int, size: int, timeout: timedelta, options: Options
) -> dist.ProcessGroup:
    """Makes a process group that torch does not register, as those of torchft."""
    made = _DistributedBackendOptions()
    made.store, made.group_rank, made.group_size = store, rank, size
    made.timeout, made.group_id = timeout, "torchft"
    backend = _backend._create(made, options)
    group = dist.ProcessGroup(store, rank, size)
    for device in device_types():
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group
