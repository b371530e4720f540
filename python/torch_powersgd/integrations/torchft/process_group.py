# SPDX-License-Identifier: BSD-3-Clause
"""The process group of torchft's manager, which compresses what is attached to it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torchft
from torch._C._distributed_c10d import (
    ErrorType,
    HashStore,
    Store,
    _DistributedBackendOptions,
)
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
from torch_powersgd.option_values import must_be, require
from torch_powersgd.options import Options, lay_over, resolve
from torch_powersgd.sparse import check_density

if TYPE_CHECKING:
    from torchft.manager import Manager


# After an error, torch by default waits for a dump and ends the process. With these variables it
# only aborts NCCL's communicators, as soon as NCCL notices that a replica is gone.
_NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}


class ProcessGroupPowerSGD(ProcessGroupWrapper):
    """The process group of torchft's ``Manager``, which compresses what is attached to it.

    Everything else is averaged exactly. A replica that stays keeps its residual through every
    quorum, and sends it to whichever replicas are there. All replicas take over the factors of one
    that has taken the most steps. If ``should_commit`` drops a step, residuals and factors go back
    to what they were before it, to the bit. This takes a copy of both (``allow_discard``).

    Args:
        timeout: Time limit of a collective, and of creating a group.
        options: A complete ``Options``, or a mapping of the fields that differ from those of
            ``configure`` and the environment. ``scope`` is always "attached", and
            ``allow_discard`` True.

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

    def attach(
        self, module: torchft.DistributedDataParallel | FSDPModule, manager: Manager
    ) -> Compression:
        """Compresses the gradients of a module layer by layer.

        Every replica must call it before its first quorum, with the same modules in the same order.

        Args:
            module: A ``DistributedDataParallel`` module of this package, made with this manager.
                (torchft's own class works too, until a replica leaves in the middle of a step.) Or
                the root of a module that FSDP2 has sharded over the processes of one replica, whose
                all-reduce hooks then average over the replicas.
            manager: The manager whose process group this is.

        Returns:
            A handle. Call its ``state_dict`` with ``per_rank=True``; without, it would wait for
            replicas that may be gone. Call ``load_state_dict`` before the first quorum.

        Raises:
            ValueError: If the module can't be attached, or there was a quorum before.
        """
        kind: Callable[..., Attached]
        if isinstance(module, torchft.DistributedDataParallel):
            kind = AttachedDdp
        elif isinstance(module, FSDPModule):
            kind = AttachedShards
        else:
            wanted = "torchft's DistributedDataParallel or a module that FSDP2 has sharded"
            raise must_be("module", wanted, type(module))
        return self._attach(kind, module, manager)

    def attach_diloco(
        self, diloco: DiLoCo, manager: Manager, density: float | None = None
    ) -> list[Compression]:
        """Like ``attach``, for what torchft's ``DiLoCo`` averages.

        In the options, a step is a round of a fragment.

        Args:
            diloco: What averages, made with this manager.
            manager: The manager whose process group this is.
            density: Share of the changes to send in place of factors, as of ``LocalSGD``.

        Returns:
            A handle for each fragment.

        Raises:
            ValueError: If DiLoCo packs or quantizes what it sends, if the density is not valid, or
                if there was a quorum before.
        """
        require(isinstance(diloco, DiLoCo), "diloco", "torchft's DiLoCo", type(diloco))
        if any(part.use_bucketization or part.should_quantize for part in diloco._fragments):
            raise ValueError(
                "attach_diloco takes a DiLoCo without use_bucketization and should_quantize, "
                "because it packs and compresses the changes itself"
            )
        parts = diloco._fragments
        family = {name for part in parts for name, _ in part._model_fragment.named_parameters()}
        if density is not None:
            check_density(density)
        kind = partial(AttachedFragment, family, density)
        return [self._attach(kind, part, manager) for part in parts]

    def _attach(self, kind: Callable[..., Attached], *given: Any) -> Compression:
        if self._pg is not None:
            raise ValueError("call attach before the manager's first quorum")
        attached = kind(*given, self)
        self._attached.append(attached)
        return attached.compression

    def allreduce(self, tensors: list[torch.Tensor], opts: object) -> dist.Work:
        """Sums the tensors over the replicas, compressed if they are attached."""
        op = getattr(opts, "reduceOp", opts)
        if len(tensors) == 1 and op == dist.ReduceOp.SUM:
            for attached in self._attached:
                work = attached.sum(tensors[0])
                if work is not None:
                    return work
        return super().allreduce(tensors, opts)

    def errored(self) -> Exception | None:
        """Returns NCCL's error, which no call raises. A commit asks once the device has waited."""
        group = self._pg
        if group is None or "cuda" not in device_types():
            return None
        try:
            error = group._get_backend(torch.device("cuda")).get_error()
        except RuntimeError:  # Gloo has none: its calls raise
            return None
        return None if error == ErrorType.SUCCESS else RuntimeError(f"NCCL failed: {error.name}")

    def _leave(self) -> None:
        """Leaves the group after an error, so that no other replica waits for this one.

        Only the replicas that wait for a dead one notice. The others wait for these replicas.
        """
        group, self._pg = self._pg, None
        if group is not None:
            group.abort()

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
        """Makes the group of a new quorum, and moves to it what is attached.

        torchft calls it whenever the quorum changes: from ``configure`` in 0.2.0, and from
        ``reconfigure`` since the nightly of 2026-10-01.
        """
        group = _make_group(store, rank, world_size, self._timeout, self._options)
        self._pg = group  # which abort() then ends, even while this waits for the others
        try:
            for attached in self._attached:
                attached.move(group)
        except BaseException:
            self._leave()
            raise
        return group


def _make_group(
    store: Store, rank: int, size: int, timeout: timedelta, options: Options
) -> dist.ProcessGroup:
    """Makes a process group that torch doesn't register, like torchft's own."""
    made = _DistributedBackendOptions()
    made.store, made.group_rank, made.group_size = store, rank, size
    made.timeout, made.group_id = timeout, "torchft"
    with _environment(_NCCL_VARIABLES):
        backend = _backend.create(made, options)
    group = dist.ProcessGroup(store, rank, size)
    for device in device_types():
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables that the user has not set."""
    own = variables.keys() - os.environ.keys()
    os.environ.update({name: variables[name] for name in own})
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]
