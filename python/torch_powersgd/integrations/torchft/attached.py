# SPDX-License-Identifier: BSD-3-Clause
"""What a process group of torchft compresses: its averages go through torchft's manager.

The manager calls the group's ``allreduce`` with a tensor, and divides the sum. Each class here
recognizes one kind of tensor: buckets of DDP, shards of FSDP2, changes of DiLoCo.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
import torchft
from torch.distributed.fsdp import FSDPModule

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.attach import compress, make_reducer
from torch_powersgd.integrations.torchft.sums import SparseSum, Sum
from torch_powersgd.local_steps import kept
from torch_powersgd.local_steps.recent_rounds import RecentRounds
from torch_powersgd.targets import DdpTarget, FsdpTarget, Target, TensorsByName, shard_of
from torch_powersgd.targets.fsdp_hooks import check_hooks, set_hooks
from torch_powersgd.targets.fsdp_units import own_replicas

if TYPE_CHECKING:
    from torchft.manager import Manager


class Groups(Protocol):
    """The manager's process group, which makes a group for each quorum."""

    _pg: dist.ProcessGroup | None  # the group of the quorum

    def _leave(self) -> None:
        """Leaves it after an error."""

    def _alone(self) -> dist.ProcessGroup:
        """Returns a group of this process alone."""


class Attached(ABC):
    """Gradients whose compression continues in every group that a quorum makes.

    Only the first backward pass of a step is compressed: a step that isn't committed is undone, and
    there is one copy of the states to undo it with.

    After an error they stay with the group that has ended, until the next quorum makes another. All
    that needs no other replica goes on there.

    Args:
        target: The gradients.
        manager: The manager that averages them.
        groups: The manager's process group.
        density: Share of the numbers to send in place of factors, as of ``Sparse``.
    """

    def __init__(
        self, target: Target, manager: Manager, groups: Groups, density: float | None = None
    ) -> None:
        self.manager, self.groups = manager, groups
        alone = groups._alone()
        self.compression = compress(
            target, None, alone, register_hook=False, apart=True, density=density
        )
        self.step: int | None = None  # the manager's count at the step begun, until it is settled
        self.compresses = False  # whether the present pass is compressed
        _settle_with(manager, self.settle)

    @abstractmethod
    def target(self) -> Target | None:
        """Returns the gradients, or None if their owner is gone."""

    @abstractmethod
    def sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Sums the tensor over the group, if it is one of these gradients."""

    def moved(self) -> None:  # noqa: B027
        """Called when the compression has a new reducer."""

    def move(self, group: dist.ProcessGroup) -> None:
        """Moves to another group. Collective in the new group."""
        target = self.target()
        if target is None or self.compression.ended:
            return
        self.settle()
        attachment = self.compression.attachment
        reducer, _ = make_reducer(target, None, group, previous=attachment)
        attachment.move(reducer, group)
        self.moved()

    def check_group(self) -> None:
        """Raises an error in any other group than that of the quorum, so that the step is dropped.

        The manager would divide a sum over fewer replicas by the number of all.
        """
        if self.compression.group is not self.groups._pg:
            raise RuntimeError(
                "the quorum's process group was aborted, or torchft made it in a way that "
                "ProcessGroupPowerSGD doesn't know, so this step is dropped"
            )

    def begin_pass(self) -> None:
        self.check_group()
        self.compresses = self.step is None
        if self.compresses:
            self.step = self.manager.current_step()

    def settle(self) -> None:
        """Undoes the last step unless it was committed: a commit advances the manager's count."""
        dropped = self.step is not None and self.manager.current_step() <= self.step
        self.step = None
        if dropped:
            self.compression.discard_step()


class AttachedDdp(Attached):
    """The buckets of torchft's DDP, whose hook hands them to the manager."""

    def __init__(self, module: torchft.DistributedDataParallel, *others: Any) -> None:
        super().__init__(DdpTarget(module), *others)
        self.module = ref(module)
        self.moved()
        self.bucket: int | None = None  # the last one of the step

    def target(self) -> Target | None:
        module = self.module()
        return DdpTarget(module) if module is not None else None

    def moved(self) -> None:
        module = self.module()
        assert module is not None
        self.buckets = _C.DdpBuckets(self.compression.attachment.reducer, module.reducer)

    def sum(self, tensor: torch.Tensor) -> dist.Work | None:
        module = self.module()
        if module is None or self.compression.ended:
            return None
        number = _C.bucket_in(module.reducer, tensor)
        if number is None:
            return None
        if self.bucket is None or number <= self.bucket:  # DDP reduces them in order
            self.begin_pass()
        self.bucket = number
        if not self.compresses:
            return None
        return Sum(self.groups._leave, self.buckets.sum(module.reducer, number, tensor))

    def settle(self) -> None:
        self.bucket = None
        super().settle()


class AttachedShards(Attached):
    """The shards of an FSDP2 module. Its hooks use this as the reducer of the replicas."""

    def __init__(self, module: FSDPModule, *others: Any) -> None:
        check_hooks(module)
        super().__init__(_ShardsOfReplica(module), *others)
        self.module = ref(module)
        self.in_pass = False
        self.next: tuple[torch.Tensor, int, Sequence[int]] | None = None
        hooked: Any = self
        set_hooks(module, hooked, replicas=1)

    def target(self) -> Target | None:
        module = self.module()
        return _ShardsOfReplica(module) if module is not None else None

    def reduce(
        self, bucket: int, buffer: torch.Tensor, parameters: Sequence[int], _: int
    ) -> dist.Work:
        self.next = buffer, bucket, parameters
        return self.manager.allreduce(buffer)

    def sum(self, tensor: torch.Tensor) -> dist.Work | None:
        if self.next is None or self.next[0] is not tensor or self.compression.ended:
            return None
        (_, bucket, parameters), self.next = self.next, None
        if not self.in_pass:
            self.begin_pass()
        self.in_pass = True
        if not self.compresses:
            return None
        reducer = self.compression.attachment.reducer
        return Sum(self.groups._leave, reducer.reduce(bucket, tensor, parameters, divisor=1))

    def end_step(self) -> None:
        if self.in_pass and self.compresses:
            self.compression.attachment.reducer.end_step()
        self.in_pass = False

    def settle(self) -> None:
        self.in_pass = False
        super().settle()

    @property
    def detached(self) -> bool:
        return self.compression.ended


class _ShardsOfReplica(FsdpTarget):
    """The shards of a module whose replicas FSDP2 doesn't know."""

    def check(self) -> None:
        if own_replicas(self.module) is not None:
            raise ValueError(
                "the mesh of this module has a dimension of replicas, but torchft keeps the "
                "replicas: call fully_shard with a mesh of one replica's processes"
            )
        self.check_units()


class AttachedFragment(Attached):
    """A fragment of torchft's DiLoCo, which averages its changes parameter by parameter.

    They are sent together once the manager has passed in the last one. After a round, the
    parameters keep a share of the residual, as ``local_steps/kept.py`` says.

    Args:
        family: Names of the parameters of all fragments.
        density: Share of the changes to send in place of factors, as of ``Sparse``.
        fragment: The fragment.
    """

    def __init__(
        self,
        family: Collection[str],
        density: float | None,
        fragment: Any,
        manager: Manager,
        groups: Groups,
    ) -> None:
        self.fragment, self.family = ref(fragment), family
        self.names = [name for name, _ in fragment._model_fragment.named_parameters()]
        super().__init__(self._target(fragment), manager, groups, density)
        self.sparse_sum: SparseSum | None = None  # of the round, if it has a density
        self.round = Sum(self.groups._leave)
        self.passed = 0  # the changes of the round that the manager has passed in, in order
        self.kept = 0.0  # the share of the residual that the parameters hold
        self.before = 0.0  # the share during the round
        self.cosine = torch.tensor(torch.nan)  # between its changes and the residual
        self.recent, self.warned = RecentRounds(sparse=density is not None), False
        _around_rounds(fragment, self.manager, self._keep, self._keep_nothing)

    def target(self) -> Target | None:
        fragment = self.fragment()
        return self._target(fragment) if fragment is not None else None

    def _target(self, fragment: Any) -> Target:
        parameters = fragment._model_fragment.named_parameters()
        shards = {name: shard_of(parameter.detach()) for name, parameter in parameters}
        return TensorsByName(shards, self.family)

    def sum(self, tensor: torch.Tensor) -> dist.Work | None:
        fragment = self.fragment()
        if fragment is None or self.compression.ended:
            return None
        changes = fragment._grads
        if tensor is changes.get(self.names[0]):
            self.check_group()
            self.round, self.passed = Sum(self.groups._leave), 0
        if self.passed == len(self.names) or tensor is not changes.get(self.names[self.passed]):
            return None
        self.passed += 1
        if self.passed == len(self.names):
            self.settle()
            self.begin_pass()
            sent = [changes[name] for name in self.names]
            residuals = self.compression.attachment.residual_holder.residuals()
            if self.manager.is_participating():  # else they are zeros
                kept.add(sent, residuals, -self.kept)
            self.cosine, self.before = kept.cosine(sent, residuals), self.kept
            self.round.begin(self._begin(sent))
        return self.round

    def _begin(self, changes: list[torch.Tensor]) -> dist.Work:
        """Begins to sum the changes over the replicas."""
        attachment = self.compression.attachment
        assert attachment.tensors is not None  # because it has not ended
        self.sparse_sum = None
        if attachment.sparse is None or not attachment.compressing:
            return attachment.tensors.sum(changes)
        self.sparse_sum = SparseSum(attachment.sparse, changes, self.manager.num_participants())
        attachment.reducer.end_step()
        return self.sparse_sum

    def _keep(self, committed: bool) -> None:
        """Called after a round, when DiLoCo has set the parameters to the original ones."""
        fragment = self.fragment()
        if fragment is None or self.compression.ended:
            return
        if committed and self.sparse_sum is not None:
            self.sparse_sum.keep()
            self.kept = kept.OF_SPARSE
            self.recent.add(self.sparse_sum.agreement.item())
        elif committed:
            self.kept = kept.share(self.cosine.item(), self.before)
            if self.compression.attachment.sparse is None:
                self.recent.add(self.kept)
        if self.recent.trouble and not self.warned:
            self.warned = True
            fragment_of = f"the fragment of {self.names[0]!r}"
            log.of(self.compression.group).warning(f"{fragment_of}: {self.recent.trouble}")
        if self.kept:
            parameters = [shard_of(p.detach()) for p in fragment._model_fragment.parameters()]
            kept.add(
                parameters, self.compression.attachment.residual_holder.residuals(), -self.kept
            )

    def _keep_nothing(self) -> None:
        """Called when what the parameters hold has become the original."""
        self.kept = 0.0


def _settle_with(manager: Manager, settle: Callable[[], None]) -> None:
    """Settles a step once the manager has decided on it, or begins another without.

    A manager has no hooks, so this function wraps two methods of this one object.
    """
    start, commit = manager.start_quorum, manager.should_commit

    @functools.wraps(start)
    def start_quorum(*args: Any, **kwargs: Any) -> None:
        settle()
        start(*args, **kwargs)

    @functools.wraps(commit)
    def should_commit(*args: Any, **kwargs: Any) -> bool:
        committed = commit(*args, **kwargs)
        settle()
        return committed

    manager.start_quorum = start_quorum
    manager.should_commit = should_commit


def _around_rounds(
    fragment: Any, manager: Manager, keep: Callable[[bool], None], forget: Callable[[], None]
) -> None:
    """Calls ``keep`` after each round of a fragment, with whether the round was committed.

    It calls ``forget`` when the fragment takes over the parameters as its original ones, and when
    the manager loads those of another replica.
    """
    perform, save = fragment.perform_sync, fragment.save_parameters

    @functools.wraps(perform)
    def perform_sync() -> bool:
        committed: bool = perform()
        keep(committed)
        return committed

    @functools.wraps(save)
    def save_parameters() -> None:
        save()
        forget()

    fragment.perform_sync, fragment.save_parameters = perform_sync, save_parameters
    key = f"powersgd_{fragment._fragment_id}"
    manager.register_state_dict_fn(key, lambda _: forget(), dict)
