# SPDX-License-Identifier: BSD-3-Clause
"""The handle that ``attach`` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful

from torch_powersgd import checkpoint, log, schema, stats
from torch_powersgd._core import _C
from torch_powersgd.agreement import Make, absent_from, agree, equality_of
from torch_powersgd.attachment import Attachment
from torch_powersgd.option_values import positive
from torch_powersgd.options import from_core
from torch_powersgd.targets.ddp import Hook, python_hook

T = TypeVar("T")


class Compression(Stateful):
    """A handle for what ``attach`` compresses.

    Print it to see what is compressed, what was sent, and whether that helps. It is a torch
    ``Stateful``, so ``dcp.save({"powersgd": compression}, ...)`` saves it.

    Dropping the handle doesn't end the compression; the end of the module does. After a DDP wrapper
    is gone, the handle keeps the residuals for ``attach(previous=...)`` as long as the model lives.

    Attributes:
        options: The options in effect.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.options = from_core(attachment.reducer.states.options)

    @property
    def _reducer(self) -> _C.BucketReducer:
        return self.attachment.reducer

    @property
    def _log(self) -> log.Log:
        return log.of(self.group, self.attachment.shard)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group that is averaged over."""
        return self.attachment.group

    @property
    def ended(self) -> bool:
        """Whether it was detached or its module is gone. Methods then raise a ``ValueError``."""
        return bool(self.attachment.ended)

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
        reducer, ddp = self._reducer, self.attachment.ddp
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
        return self.attachment.all_reduce(tensors, partial(absent_from, self.group, call))

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
            ``bytes_before``: the gradients. ``bytes_after``: the payloads sent in their place, as
            encoded on the wire. Two processes send each other one, as do two hosts that sum those
            of their processes. Among more, each sends several. ``ratio`` of the two, and
            ``compressed_ratio``, the same for the compressed calls alone.

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
        stats.notify_if_not_started(reducer, self._log)
        return stats.of_attached(self.attachment, per_layer, residual_norms, flat)

    def reset_stats(self) -> None:
        """Sets the counts of ``stats`` to zero, except ``steps``."""
        self.attachment.reset_counts()

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
            self._agree_on_step("state_dict")
        state = checkpoint.of_states(states, per_rank, self.attachment.sparse)
        if self.attachment.residual is not None:
            self.attachment.residual.note_saved()
        key = self.attachment.key(per_rank)
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

        def make() -> tuple[checkpoint.Loaded, dict[str, Any]]:
            loaded = self.attachment.read(state_dict)
            return loaded, loaded.same

        loaded = self._agree("load_state_dict", make)
        self.attachment.load(loaded)
        count = len(loaded.entries) + len(loaded.residuals)
        many = "parameter" if count == 1 else "parameters"
        self._log.notice(
            f"loaded the state of step {loaded.step}, with the residuals of {count} {many}"
            if loaded.step
            else "loaded a state without any step, so compression starts as in a new run"
        )

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
        self._agree_on_step("detach")
        self.attachment.end("it was detached")

    def __str__(self) -> str:
        if self.ended:
            return f"{type(self).__name__}: {self.attachment.ended}"
        return stats.summary(self.attachment, self.options)

    __repr__ = __str__

    def _agree_on_step(self, call: str) -> None:
        step = self._reducer.states.step
        self._agree(call, lambda: (None, {"step": step}))

    def _agree(self, call: str, make: Make[T]) -> T:
        # All compressions of a group share the count of calls, so the names tell them apart.
        names = schema.checksum(self._reducer.states.names)

        def with_names() -> tuple[T, dict[str, Any]]:
            made, mine = make()
            return made, {"the hash of the parameter names": names, **mine}

        return agree(self.group, call, with_names, equality_of(f"the calls of {call}"))[0]
