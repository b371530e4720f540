# SPDX-License-Identifier: BSD-3-Clause
"""The handle that ``attach`` returns."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import (
    checkpoint,
    log,
    reduction_checks,
    rewrapping,
    stats,
)
from torch_powersgd._core import _C
from torch_powersgd.attach_checks import Previous
from torch_powersgd.ddp import Hook, python_hook
from torch_powersgd.group_backends import next_call_on
from torch_powersgd.option_values import positive
from torch_powersgd.options import Options
from torch_powersgd.store_agreement import (
    Compare,
    absent_from,
    equality_of,
    error_as_arguments,
)
from torch_powersgd.summary import summary
from torch_powersgd.targets import Target, shard_of

# Of named tensors. On CPUs as DDP's bucket_cap_mb; GPUs spend less on fewer calls.
BUCKET_BYTES = 25 << 20
BUCKET_BYTES_ON_GPUS = 100 << 20


class Compression(Stateful):
    """A handle for what ``attach`` compresses.

    Print it to see what is compressed, what was sent, and whether that helps. It is a torch
    ``Stateful``, so ``dcp.save({"powersgd": compression}, ...)`` saves it.

    Dropping the handle doesn't end the compression; the end of the module does. After a DDP wrapper
    is gone, the handle keeps the residuals for ``attach(previous=...)`` as long as the model lives.

    Attributes:
        group: The process group that is averaged over.
        options: The options in effect.
    """

    def __init__(
        self,
        target: Target,
        reducer: _C.BucketReducer,
        group: dist.ProcessGroup,
        described: list[str],
        previous: Compression | None = None,
    ) -> None:
        self.group = group
        self._described = described  # the gradients
        self.options = Options._from_core(reducer.states.options)
        self._attached: _C.BucketReducer | None = reducer
        self._left: _C.BucketReducer | None = None  # once the wrapper is gone but not the model
        self._model: ref[torch.nn.Module] | None = None
        self._wrapper: rewrapping.Wrapper | None = None
        self._module: ref[torch.nn.Module] | None = None
        self._tensors: _C.NamedTensors | None = None
        self._shard = target.shard(group)
        self._apart = False  # whether each process has checkpoints of its own, as with torchft
        self._ended = "its module no longer exists"
        module = target.module
        if module is None:
            self._bucket_bytes = _bucket_bytes(target)
            self._tensors = _C.NamedTensors(reducer, self._bucket_bytes)
            return
        self._module = ref(module)
        # The module keeps the handle alive: checks and scalers refer only weakly to its reducer.
        finalize(module, self._let_go).atexit = False
        if isinstance(module, DistributedDataParallel):
            before = previous._wrapper if previous is not None else None
            self._wrapper = rewrapping.note_wrapper(module, reducer, described, before)
            self._model = ref(module.module)
            finalize(module.module, _forget_states, ref(self)).atexit = False
        if group.size() > 1:
            reduction_checks.check(module, reducer, warns=group.rank() == 0)

    @property
    def _reducer(self) -> _C.BucketReducer:
        if self._attached is None:
            raise ValueError(f"this compression can no longer be used: {self._ended}")
        return self._attached

    def _let_go(self) -> None:
        """Ends with the module. If only the DDP wrapper is gone, the states stay for the next."""
        if self._model is not None and self._model() is not None:
            self._left = self._attached
        self._attached = self._tensors = None

    @property
    def _buckets(self) -> list[list[int]]:
        """The numbers of the named tensors in each bucket."""
        return self._tensors.buckets if self._tensors is not None else []

    @property
    def _speaks(self) -> bool:
        """Whether this process logs for all: the first process of the first shard does."""
        return self.group.rank() == 0 and (not self._shard or self._shard.startswith("shard 0 "))

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        module = self._module() if self._module is not None else None
        return module if isinstance(module, DistributedDataParallel) else None

    @property
    def ended(self) -> bool:
        """Whether it was detached or its module is gone. Methods then raise a ``ValueError``."""
        return self._attached is None

    @property
    def comm_hook(self) -> Hook:
        """The hook that ``attach`` registers, in Python.

        Use it with torch's hooks that wrap another hook:

            compression = torch_powersgd.attach(ddp, register_hook=False)
            hook = hook_with_zero_step(compression.comm_hook, ddp, zero)
            ddp.register_comm_hook(None, hook)

        Raises:
            ValueError: If something other than a DDP module was attached.
        """
        reducer, ddp = self._reducer, self._ddp
        if ddp is None:
            raise ValueError("comm_hook is only for a DDP module")
        return python_hook(ddp, reducer)

    def all_reduce(self, tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> dist.Work:
        """Averages the attached tensors in place, compressed, and counts a step. Collective.

        Returns immediately. Don't use the tensors until the returned work's ``wait`` has returned;
        they then hold the averages. They are sent in buckets that overlap, like DDP's. Tensors that
        lie side by side in memory, in the order of ``attach``, take no more of it; others are
        copied until then.

        Args:
            tensors: All tensors that were passed to ``attach``, by name or in the same order. They
                must have the same shapes, dtypes and devices, but may be other tensors.

        Raises:
            ValueError: If a tensor is missing, unknown, or of another shape, dtype or device; or if
                a module was attached, whose gradients are averaged in its backward pass.
            RuntimeError: From the work's ``wait``, if a process doesn't call it within the group's
                timeout. It names that process.
        """
        call = f"called all_reduce in step {self._reducer.states.step}"
        return self._all_reduce(tensors, partial(absent_from, self.group, call))

    def _all_reduce(
        self,
        tensors: Mapping[str, torch.Tensor] | Sequence[torch.Tensor],
        find_absent: Callable[[], str] | None = None,
    ) -> dist.Work:
        names = self._reducer.states.names
        if self._tensors is None:
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
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{name!r} must be a tensor, got {type(tensor).__name__}")
        return self._tensors.all_reduce([shard_of(tensor) for tensor in tensors], find_absent)

    def stats(
        self, *, per_layer: bool = False, residual_norms: bool = True, flat: bool = False
    ) -> dict[str, Any]:
        """Returns this process's counts of the attached gradients. It is not collective.

        If compression won't start soon, the first process of the group logs that once.

        Args:
            per_layer: Whether to return ``layers`` as well.
            residual_norms: Whether to compute the residuals' norms, which takes a pass over the
                residuals. Without them and ``layers``, ``stats`` is cheap enough for every step.
            flat: Whether to return only numbers, as ``SummaryWriter`` and other loggers expect.
                Names of nested entries are joined by "/" (``seconds/project``), and a ``starts_at``
                of None is left out.

        Returns:
            A dictionary. ``compressing``: whether the next step is compressed. ``starts_at``: the
            first step that is, or None if none will be. ``steps``: the steps so far, including
            those before a checkpoint that was loaded.

            The other counts are this process's, since ``attach`` or ``reset_stats``:

            ``skipped_steps``: steps in which a gradient was not finite on some process.
            ``differences``: factors that differed between processes, which ``check_every`` found
            and repaired.

            ``compressed_calls`` and ``exact_calls``: buckets that were compressed, or sent whole.
            ``bytes_before``: the gradients. ``bytes_after``: what this process sent instead, as
            encoded on the wire. ``ratio`` of the two, and ``compressed_ratio``, the same for the
            compressed calls alone.

            ``seconds`` of each stage. ``residual_norms``: {parameter: Frobenius norm}.

            ``layers``: {parameter: its last step on this process}, with ``rows`` and ``cols`` of
            the matrix; ``rank`` of its factors, 0 if it is sent raw; ``bytes_before`` and
            ``bytes_after`` of a compressed step; ``residual`` and ``gradient``, the Frobenius norms
            of the residual and of the averaged gradient, both in units of the loss scale;
            ``residual_ratio``, the first over the second; and ``captured``, |q|^2 / |M|^2, the
            share of M = gradient + residual that this process sent. The last three are None if the
            last step sent no factors, and ``captured`` also without error feedback.
        """
        reducer = self._reducer
        if self._speaks:
            stats.notify_if_not_started(reducer)
        return stats.of_attached(reducer, per_layer, residual_norms, flat)

    def reset_stats(self) -> None:
        """Sets the counts of ``stats`` to zero, except ``steps``."""
        self._reducer.reset_stats()

    def state_dict(self, per_rank: bool = False) -> dict[str, Any]:
        """Returns the residuals and factors. Collective without ``per_rank``.

        Args:
            per_rank: If False, the state is the same on all processes, and any number of processes
                can load it. If True, it is this process's own: save and load it on every process,
                and the job continues bit for bit as if it had not been interrupted.

        Returns:
            A dictionary of ``version``, ``options`` (field: value), ``step``, ``grad_scale`` and
            ``parameters``, which has an entry for every compressed parameter. Its ``residual`` is
            the mean over the processes of what no step has sent yet, in the parameter's shape and
            in units of the averaged gradient at ``grad_scale``. Its ``q`` is the factor that the
            next step starts from, [r, m] for a parameter seen as n x m.

            With ``per_rank``, an entry is this process's ``memory`` [n, m] (None without error
            feedback), ``p_hat`` [n, r], ``q_local`` and ``q_warm`` [r, m], and ``grad_scale``.

            A state of one process or shard is nested under a key that names it, such as ``"shard 0
            of 2"``, ``"process 1 of 4"`` or ``"shard 0 of 2, process 1 of 2"``. This is how
            ``torch.distributed.checkpoint`` keeps them apart. The parameters of an FSDP2 module are
            this process's shards, padded as FSDP2 pads them.

            Complex parameters are seen through ``torch.view_as_real``. Every entry has a checksum
            ``crc32`` of its content, and the dictionary has one of everything except
            ``parameters``; ``load_state_dict`` verifies them.

        Raises:
            ValueError: Without ``per_rank``, on every process, if one doesn't call it.
        """
        states = self._reducer.states
        if not per_rank:
            self._agree("state_dict", {"step": states.step})
        state = checkpoint.of_states(states, per_rank)
        if self._wrapper is not None:
            self._wrapper.note_saved()
        key = self._key(per_rank)
        return {key: state} if key else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned. Collective.

        A state without ``per_rank`` fits any number of processes. Every process takes the mean
        residual, which leaves the mean over the processes unchanged. If the matrix rank differs,
        ``q`` is cut, or extended with random columns. The step count continues from the state's.

        Args:
            state_dict: Dictionary that ``state_dict`` returned. It may also hold the states of
                other processes and shards.

        Raises:
            ValueError: On every process and before anything changes, if the state doesn't fit:
                it is of another form or shape, it is damaged, a number in it is not finite, or the
                processes have states of different steps or, without ``per_rank``, of different
                content. A state with ``per_rank`` fits only its own process, of as many processes.
        """
        loaded: checkpoint.Loaded | None = None
        try:
            loaded = self._read(state_dict)
            mine = loaded.plain()
        except Exception as invalid:  # Of any type: the other processes wait for it.
            mine = error_as_arguments(invalid)
        self._agree("load_state_dict", mine, checkpoint.compare)
        assert loaded is not None  # otherwise _agree raised
        loaded.into(self._reducer.states)
        if self._speaks:
            many = "parameter" if loaded.parameters == 1 else "parameters"
            log.notice(
                f"loaded the state of step {loaded.step}, with the residuals of "
                f"{loaded.parameters} {many}"
                if loaded.step
                else "loaded a state without any step, so compression starts as in a new run"
            )

    def _read(self, state_dict: dict[str, Any]) -> checkpoint.Loaded:
        """Returns this process's part, checked. It raises a ValueError if it does not fit."""
        keys = {per_rank: self._key(per_rank) for per_rank in (False, True)}
        return checkpoint.read(self._reducer.states, state_dict, keys)

    @property
    def per_rank(self) -> Stateful:
        """A view whose ``state_dict`` has ``per_rank``: ``dcp.save({"powersgd": c.per_rank})``."""
        return checkpoint.PerRank(self)

    def step_skipped(self) -> None:
        """Sends the gradients of the last step again in the next one.

        Call it if the optimizer did not apply gradients that were good. If they were bad, call
        ``discard_step`` instead. Every process must call it after the step (for a module, its last
        synchronized backward pass) and before the next one. ``attach(module, scaler=...)`` calls it
        for you.
        """
        self._reducer.states.step_skipped()

    def discard_step(self) -> None:
        """Forgets the gradients of the last step.

        Call it if the optimizer did not apply them because they were bad, as in a loss spike. The
        residuals and factors become what they were before the step, to the bit. Every process must
        call it after the step and before the next one.

        Raises:
            ValueError: If the options lack ``allow_discard``.
        """
        self._reducer.states.discard_step()

    @property
    def grad_scale(self) -> float:
        """The loss scale of the next gradients, finite and > 0.

        Set it, to the same value on all processes, before a backward pass with another scale. The
        residuals follow. You don't need it for a module that was attached with a scaler.

        Raises:
            ValueError: If the value set is not allowed.
        """
        return self._reducer.states.grad_scale

    @grad_scale.setter
    def grad_scale(self, scale: float) -> None:
        self._reducer.states.grad_scale = positive("grad_scale", scale)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which gradients are averaged exactly. Compressed steps after it send what
        the residuals hold.

        Every process must enter it between the same two steps.
        """
        reducer = self._reducer
        before, reducer.active = reducer.active, False
        try:
            yield
        finally:
            if not self.ended:
                reducer.active = before

    def detach(self) -> None:
        """Ends the compression, so gradients are averaged exactly from now on. Collective.

        This frees the residuals and factors. What was not sent yet is lost unless you call
        ``state_dict`` first. The module can be attached again, with any options.

        Raises:
            ValueError: On every process, if one doesn't call it.
        """
        reducer = self._reducer
        self._agree("detach", {"step": reducer.states.step})
        reducer.detach()
        self._ended = "it was detached"
        self._end()

    def _as_previous(self) -> Previous:
        return Previous(self._attached or self._left, self._described, self._ended)

    def _go_on(self, reducer: _C.BucketReducer, group: dist.ProcessGroup) -> None:
        """Continues in another group, with a reducer that has copied the states.

        The former reducer isn't detached, because another thread may be reading its states.
        """
        reducer.note_attached()
        if self._wrapper is not None:
            self._wrapper.note_moved(reducer)
        if self._tensors is not None:
            self._tensors = _C.NamedTensors(reducer, self._bucket_bytes)
        self.group, self._attached = group, reducer

    def _hand_over(self) -> None:
        """Ends, because another compression has copied the states."""
        if (reducer := self._attached or self._left) is not None:
            reducer.detach()
        self._ended = "it was passed to attach as previous"
        self._end()

    def _end(self) -> None:
        if self._wrapper is not None:
            self._wrapper.note_ended()
        self._attached = self._left = self._tensors = None

    def __str__(self) -> str:
        if self.ended:
            return f"{type(self).__name__}: {self._ended}"
        return summary(self._reducer, self.group, self.options)

    __repr__ = __str__

    def _key(self, per_rank: bool) -> str:
        named = per_rank and not self._apart
        own = f"process {self.group.rank()} of {self.group.size()}" if named else ""
        return ", ".join(filter(None, (self._shard, own)))

    def _agree(self, function: str, mine: dict[str, Any], compare: Compare | None = None) -> None:
        """Waits until all processes have made the same call. An error names those that don't."""
        # All compressions of a group share the count of calls, so the names tell them apart.
        names = zlib.crc32(repr(self._reducer.states.names).encode())
        mine = {**mine, checkpoint.NAMES: names}
        same = equality_of(f"the calls of {function}")
        next_call_on(self.group, function).agree(mine, compare or same)


def _bucket_bytes(target: Target) -> int:
    on_cpus = all(tensor.is_cpu for tensor in target.gradients().values())
    return BUCKET_BYTES if on_cpus else BUCKET_BYTES_ON_GPUS


def _forget_states(compression: ref[Compression]) -> None:
    if (found := compression()) is not None:
        found._left = None
