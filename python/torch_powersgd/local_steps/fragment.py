# SPDX-License-Identifier: BSD-3-Clause
"""One round of some parameters: what has changed is sent, and its mean comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from torch_powersgd.attach import compress
from torch_powersgd.options import Options
from torch_powersgd.targets import NamedTensors, shard_of

Tensors = dict[str, torch.Tensor]


class Fragment:
    """Parameters that are averaged together.

    Their *anchor* is the value that they had on all processes after the last round. What is
    averaged is how far the local steps have moved them from it: anchor - parameter, which DiLoCo
    calls the pseudo-gradient. The anchor of a parameter narrower than float32 is in float32, so
    that small averages add up.

    Args:
        parameters: Trainable parameters by name, the same values on all processes.
        options: Options of the compression, as in ``attach``.
        group: Group to average over.
    """

    def __init__(
        self,
        parameters: Tensors,
        options: Options | Mapping[str, Any] | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.parameters = parameters
        self.anchors = {name: at_least_float32(p).clone() for name, p in parameters.items()}
        self.compression = compress(NamedTensors(self.anchors), options, group)
        self._work: dist.Work | None = None
        self._changes: Tensors = {}
        self._begun_at: Tensors = {}  # the parameters when their changes were sent

    @property
    def gradient_bytes(self) -> int:
        """The bytes that averaging the gradients in one step would send."""
        return sum(shard_of(parameter).nbytes for parameter in self.parameters.values())

    @property
    def round_bytes(self) -> int:
        """The bytes that a compressed round sends."""
        return self.compression._reducer.states.outline().bytes_after

    @property
    def in_flight(self) -> bool:
        """Whether a round has begun and not finished."""
        return self._work is not None

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, overlaps: bool, find_absent: Callable[[], str]) -> str:
        """Sends the changes without waiting.

        If a parameter is not finite here, nothing of this process's round can be averaged: all of
        it is sent as NaN, and all processes drop it.

        Args:
            overlaps: Whether local steps are taken before ``finish``.
            find_absent: Function to call if the round fails, as of ``store_agreement.absent_from``.

        Returns:
            The name of a parameter that is not finite, or nothing.
        """
        for name, parameter in self.parameters.items():
            anchor = self.anchors[name]
            self._changes[name] = anchor.to(parameter.dtype).to(anchor.dtype) - parameter
        if overlaps:
            self._begun_at = {name: p.detach().clone() for name, p in self.parameters.items()}
        not_finite = _first_of(_finite(self._changes))
        if not_finite:
            for change in self._changes.values():
                change.fill_(torch.nan)
        self._work = self.compression._all_reduce(self._changes, find_absent)
        return not_finite

    @torch.inference_mode(False)  # An outer optimizer keeps what it makes of the means.
    @torch.no_grad()
    def finish(self, update: Callable[[Fragment, Tensors], None]) -> str:
        """Waits for the means, and moves the anchors and the parameters.

        A parameter whose mean is not finite goes back to its anchor, as if there had been no round.

        Args:
            update: Function of the fragment and the finite means, which moves the anchors.

        Returns:
            The name of a parameter whose mean is not finite, or nothing.
        """
        assert self._work is not None
        self._work.wait()
        self._work, means = None, self._changes
        begun_at, self._begun_at, self._changes = self._begun_at, {}, {}
        finite = _finite(means)
        update(self, {name: mean for name, mean in means.items() if finite[name]})
        for name, parameter in self.parameters.items():
            anchor = self.anchors[name].to(parameter.dtype)
            overlapped = finite[name] and name in begun_at
            parameter.copy_(anchor + (parameter - begun_at[name]) if overlapped else anchor)
        return _first_of(finite)

    def discard(self) -> None:
        """Ends a round in flight, and changes nothing."""
        if self._work is not None:
            self._work.wait()
        self._work, self._begun_at, self._changes = None, {}, {}

    @torch.no_grad()
    def restart(self) -> None:
        """Makes the parameters, which are equal on all processes, the anchors of a first round."""
        self.discard()
        states = self.compression._reducer.states
        local = states.export_local()
        for of in local:
            for part in (of.memory, of.q_local):  # The residual is memory - p_hat q_local^T.
                if part is not None:
                    part.zero_()
        states.load_local(local, states.step)
        for name, anchor in self.anchors.items():
            anchor.copy_(self.parameters[name])

    def subtract(self, means: Tensors) -> None:
        """Moves the anchors to the mean of the processes' parameters."""
        for name, mean in means.items():
            self.anchors[name] -= mean

    @torch.no_grad()
    def reset(self) -> None:
        """Sets the parameters to the anchors."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.anchors[name])


def reshard(model: torch.nn.Module) -> None:
    """Shards FSDP2's root, which a forward pass without a backward pass leaves whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in float32, or itself if its type is at least as wide."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _finite(tensors: Tensors) -> dict[str, bool]:
    """Whether all elements that this process holds are finite, by name."""
    found = [shard_of(tensor).isfinite().all() for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(found).tolist(), strict=True))


def _first_of(finite: Mapping[str, bool]) -> str:
    """The first name that is not finite, or nothing."""
    return next((name for name, fits in finite.items() if not fits), "")
