# SPDX-License-Identifier: BSD-3-Clause
"""What a compression acts on, from ``attach`` to its end. Only this package uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import checkpoint
from torch_powersgd._core import _C
from torch_powersgd.option_values import require
from torch_powersgd.sparse import Sparse
from torch_powersgd.targets import Target, shard_of
from torch_powersgd.targets.misuse import Residual, watch_use

# Of named tensors. On CPUs as DDP's bucket_cap_mb; GPUs spend less on fewer calls.
BUCKET_BYTES = 25 << 20
BUCKET_BYTES_ON_GPUS = 100 << 20


class Attachment:
    """Gradients, the reducer that averages them, and the group.

    It lives until ``end``, or until its module is gone. Another attachment can take over the states
    of one whose DDP wrapper is gone, as long as the model lives.

    Args:
        apart: Whether each process has checkpoints of its own, as with torchft.

    Attributes:
        group: Group that is averaged over.
        described: The gradients in words.
        shard: Name of the shard that the group averages, or nothing if it averages everything.
        ended: Why it has ended, or nothing while it lives.
        kept: The reducer, as long as it lives or its states can be taken over.
        tensors: The gradients of an attachment to named tensors.
        sparse: What averages them instead, in local steps with a density.
        residual: What is known of the residual of a DDP wrapper.
    """

    def __init__(
        self,
        target: Target,
        reducer: _C.BucketReducer,
        group: dist.ProcessGroup,
        described: list[str],
        previous: Attachment | None = None,
        apart: bool = False,
    ) -> None:
        self.group, self.described = group, described
        self.ended = ""
        self.kept: _C.BucketReducer | None = reducer
        self.tensors: _C.NamedTensors | None = None
        self.sparse: Sparse | None = None
        self.residual: Residual | None = None
        self._module: ref[torch.nn.Module] | None = None
        self.shard, self._apart = target.shard(group), apart
        module = target.module
        if module is None:
            self._bucket_bytes = bucket_bytes(target)
            self.tensors = _C.NamedTensors(reducer, self._bucket_bytes)
            return
        before = previous.residual if previous is not None else None
        self.residual = watch_use(module, reducer, group, described, before)
        self._module = ref(module)
        model: ref[torch.nn.Module] | None = None
        if isinstance(module, DistributedDataParallel):
            model = ref(module.module)
            finalize(module.module, _forget_states, ref(self)).atexit = False
        # The module keeps this alive: checks and scalers refer only weakly to its reducer.
        finalize(module, self._lose_module, model).atexit = False

    @property
    def reducer(self) -> _C.BucketReducer:
        """The reducer. It raises a ValueError if the attachment has ended."""
        if self.ended or self.kept is None:
            raise ValueError(f"this compression can no longer be used: {self.ended}")
        return self.kept

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DDP module, if it is one."""
        module = self._module() if self._module is not None else None
        return module if isinstance(module, DistributedDataParallel) else None

    def move(self, reducer: _C.BucketReducer, group: dist.ProcessGroup) -> None:
        """Continues in another group, with a reducer that has copied the states.

        The former reducer isn't detached, because another thread may be reading its states.
        """
        reducer.note_attached()
        if self.residual is not None:
            self.residual.note_moved(reducer)
        if self.tensors is not None:
            self.tensors = _C.NamedTensors(reducer, self._bucket_bytes)
        if self.sparse is not None:
            self.sparse.group = group
        self.group, self.kept = group, reducer

    @property
    def residual_holder(self) -> _C.ModelStates | Sparse:
        """What has ``residuals`` and ``take_residuals``."""
        return self.reducer.states if self.sparse is None else self.sparse

    @property
    def compressing(self) -> bool:
        """Whether the next step is compressed."""
        if self.sparse is None:
            return self.reducer.compressing
        start = self.starts_at
        return self.reducer.active and start is not None and self.reducer.states.step >= start

    @property
    def starts_at(self) -> int | None:
        """The first step that is compressed, or None if none will be."""
        if self.sparse is None:
            return self.reducer.starts_at
        start: int = self.reducer.states.options.start_powerSGD_iter
        return start if self.group.size() > 1 else None

    def end(self, reason: str) -> None:
        """Ends it: gradients are averaged exactly, and the states are freed."""
        if self.kept is not None:
            self.kept.detach()
        if self.residual is not None:
            self.residual.note_ended()
        self.ended, self.kept, self.tensors = reason, None, None

    def _lose_module(self, model: ref[torch.nn.Module] | None) -> None:
        """Ends with the module. If only the DDP wrapper is gone, the states stay for the next."""
        if not self.ended:
            self.ended, self.tensors = "its module no longer exists", None
        if model is None or model() is None:
            self.kept = None

    def all_reduce(
        self,
        tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
        find_absent: Callable[[], str] | None = None,
    ) -> dist.Work:
        """Does what ``Compression.all_reduce`` documents.

        Args:
            tensors: The tensors.
            find_absent: Function to call if it fails, as of ``agreement.absent_from``.
        """
        names = self.reducer.states.names
        if self.tensors is None:
            raise ValueError(
                "all_reduce is for tensors that were attached by name; a module's gradients are "
                "averaged in its backward pass"
            )
        if isinstance(tensors, Mapping):
            known = set(names)
            unknown = [name for name in tensors if name not in known]
            missing = [name for name in names if name not in tensors]
            if unknown or missing:
                what = f"{missing[0]!r} is missing" if missing else f"{unknown[0]!r} was not"
                raise ValueError(f"all_reduce takes the tensors that were attached: {what}")
            tensors = [tensors[name] for name in names]
        for name, tensor in zip(names, tensors, strict=False):  # the core checks the number
            require(isinstance(tensor, torch.Tensor), repr(name), "a tensor", type(tensor))
        return self.tensors.all_reduce([shard_of(tensor) for tensor in tensors], find_absent)

    def key(self, per_rank: bool) -> str:
        """Returns the key of this process's part in a checkpoint. It may be empty."""
        named = per_rank and not self._apart
        own = f"process {self.group.rank()} of {self.group.size()}" if named else ""
        return ", ".join(filter(None, (self.shard, own)))

    def read(self, state_dict: dict[str, Any], place: str = "") -> checkpoint.Loaded:
        """Returns this process's part, checked. It raises a ValueError if it does not fit.

        Args:
            state_dict: A saved state, which may hold anything.
            place: Its place in the whole state, for messages.
        """
        keys = {per_rank: self.key(per_rank) for per_rank in (False, True)}
        return checkpoint.read(self.reducer.states, state_dict, keys, place, self.sparse)

    def load(self, loaded: checkpoint.Loaded) -> None:
        """Takes over a state that ``read`` has returned."""
        loaded.into(self.reducer.states, self.sparse)

    def reset_counts(self) -> None:
        self.reducer.reset_stats()
        if self.sparse is not None:
            self.sparse.reset_counts()

    def counts(self) -> dict[str, Any]:
        """Returns what was sent, and how often, as ``BucketReducer.stats`` does."""
        counts = self.reducer.stats()
        if self.sparse is not None:
            self.sparse.add_to(counts)
        return counts


def bucket_bytes(target: Target) -> int:
    """Returns the bytes of named tensors that are sent together."""
    on_cpus = all(tensor.is_cpu for tensor in target.gradients().values())
    return BUCKET_BYTES if on_cpus else BUCKET_BYTES_ON_GPUS


def _forget_states(attachment: ref[Attachment]) -> None:
    """Frees the states of an attachment whose wrapper was gone before its model."""
    if (found := attachment()) is not None and found.ended:
        found.kept = None
