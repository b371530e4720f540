# SPDX-License-Identifier: BSD-3-Clause
"""torchft, with which a job goes on when replicas leave and join.

    from torch_powersgd.integrations.torchft import DistributedDataParallel, ProcessGroupPowerSGD
    from torchft import Manager, Optimizer

    group = ProcessGroupPowerSGD(timeout=timedelta(seconds=30))
    manager = Manager(pg=group, ...)
    ddp = DistributedDataParallel(manager, model)
    compression = group.attach(ddp, manager)

examples/with_torchft.py is a whole program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
import torch.distributed as dist
import torchft
from torch._C._distributed_c10d import HashStore, Store, _DistributedBackendOptions
from torchft.process_group import ProcessGroupWrapper

from torch_powersgd import _backend
from torch_powersgd._core import _C
from torch_powersgd.attach import compress, make_reducer
from torch_powersgd.compression import Compression
from torch_powersgd.group_backends import device_types
from torch_powersgd.options import Options, lay_over, resolve
from torch_powersgd.targets import DdpTarget

if TYPE_CHECKING:
    from torchft.manager import Manager


class DistributedDataParallel(torchft.DistributedDataParallel):
    """torchft's module, whose hook goes on after an error, as the manager does.

    The hook of torchft 0.2.0 fails an assertion in the bucket that another replica has left, and in
    each bucket after it. That ends the process, over any process group.
    """

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        state.allreduce(buffer).wait()  # the manager keeps the error
        devices: Any = [] if buffer.device.type == "cpu" else [buffer.device]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        done.set_result(buffer)
        return done

    _comm_hook.__annotations__.clear()  # DDP compares them with types, and these are strings.


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
        self._attached: list[_Attached] = []

    def attach(self, module: torchft.DistributedDataParallel, manager: Manager) -> Compression:
        """Compresses the gradients of a module layer by layer.

        Every replica calls it before its first quorum, with the same modules in one order.

        Args:
            module: A ``DistributedDataParallel`` module of this page, made with this manager. One
                of torchft's class trains alike, until a replica leaves in a step.
            manager: The manager whose process group this is.

        Returns:
            The handle of the compression. Its ``state_dict`` needs ``per_rank=True``: without, it
            waits for replicas that may be gone.

        Raises:
            ValueError: If the module cannot be attached, or a quorum was there before.
        """
        if self._pg is not None:
            raise ValueError("attach must be called before the manager's first quorum")
        if not isinstance(module, torchft.DistributedDataParallel):
            raise ValueError(
                "attach takes a DistributedDataParallel module of torchft, got "
                f"{type(module).__name__}"
            )
        compression = compress(DdpTarget(module), None, self._alone(), register_hook=False)
        self._attached.append(_Attached(module, manager, compression))
        return compression

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
        """Sums the tensors over the replicas: buckets of attached modules compressed."""
        op = getattr(opts, "reduceOp", opts)
        if len(tensors) == 1 and op == dist.ReduceOp.SUM:
            for attached in self._attached:
                work = attached.sum(tensors[0])
                if work is not None:
                    return _Work(work, self._leave)
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


class _Attached:
    """A module of torchft's DDP, whose hook sums each bucket by the process group."""

    def __init__(
        self, module: torchft.DistributedDataParallel, manager: Manager, compression: Compression
    ) -> None:
        self.module, self.manager, self.compression = ref(module), manager, compression
        self.buckets = _C.DdpBuckets(compression._reducer, module.reducer)
        self.bucket: int | None = None  # the last one that was summed
        self.step: int | None = None  # the manager's, of the last pass that was summed

    def sum(self, buffer: torch.Tensor) -> dist.Work | None:
        """Sums the buffer if it is a bucket of the module."""
        module = self.module()
        if module is None or self.compression.ended:
            return None
        number = _C.bucket_in(module.reducer, buffer)
        if number is None:
            return None
        if self.bucket is None or number <= self.bucket:  # DDP reduces them in order
            self.settle()
            self.step = self.manager.current_step()
        self.bucket = number
        return self.buckets.sum(module.reducer, number, buffer)

    def move(self, group: dist.ProcessGroup) -> None:
        """Goes on in another group."""
        module, compression = self.module(), self.compression
        if module is None or compression.ended:
            return
        reducer, _ = make_reducer(DdpTarget(module), None, group, previous=compression)
        compression._attached, compression.group = reducer, group
        self.buckets = _C.DdpBuckets(reducer, module.reducer)
        self.settle()

    def settle(self) -> None:
        """Undoes the last step unless it was committed, which makes the manager count on."""
        dropped = self.step is not None and self.manager.current_step() <= self.step
        self.step = self.bucket = None
        if dropped:
            self.compression.discard_step()


class _Work(dist._Work):
    """A work whose future is complete once ``wait`` has returned, as the manager expects.

    Args:
        work: The work.
        failed: Called if it has failed.
    """

    def __init__(self, work: dist.Work, failed: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._future, self._failed = work, work.get_future(), failed

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._work.wait() if timeout is None else self._work.wait(timeout)
            self._future.wait()
        except Exception:
            self._failed()
            raise
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def synchronize(self) -> None:
        self._work.synchronize()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()


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
