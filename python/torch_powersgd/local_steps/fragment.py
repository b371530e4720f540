# SPDX-License-Identifier: BSD-3-Clause
"""One round of some parameters: what has changed is sent, and its mean comes back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torch_powersgd.attach import compress
from torch_powersgd.matrices import as_reals
from torch_powersgd.options import Options
from torch_powersgd.targets import TensorsByName, shard_of

Tensors = dict[str, torch.Tensor]
List = list[torch.Tensor]

_LARGE = 1 << 20  # numbers, whose difference takes longer to compute than to launch


@dataclass(frozen=True)
class _Round:
    """A round in flight, of what this process holds, as real numbers.

    Attributes:
        work: Work that replaces the changes with their means.
        changes: Changes, in the order of the parameters.
        buffers: Memory of the changes.
        begun_at: Parameters when their changes were sent, if local steps overlap.
        sent: Number that was added to the changes: NaN if one was not finite, and otherwise -0.0.
    """

    work: dist.Work
    changes: List
    buffers: List
    begun_at: List
    sent: torch.Tensor


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
        family: Names of the parameters of all fragments.
    """

    def __init__(
        self,
        parameters: Tensors,
        options: Options | Mapping[str, Any] | None,
        group: dist.ProcessGroup,
        family: Collection[str],
    ) -> None:
        self.parameters = parameters
        self.anchors = {name: at_least_float32(p).clone() for name, p in parameters.items()}
        self.compression = compress(TensorsByName(self.anchors, family), options, group)
        self.attachment = self.compression.attachment
        self._round: _Round | None = None

    @property
    def gradient_bytes(self) -> int:
        """The bytes that averaging the gradients in one step would send."""
        return sum(shard_of(parameter).nbytes for parameter in self.parameters.values())

    @property
    def round_bytes(self) -> int:
        """The bytes that a compressed round sends."""
        return self.attachment.reducer.states.outline().bytes_after

    @property
    def in_flight(self) -> bool:
        """Whether a round has begun and not finished."""
        return self._round is not None

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, overlaps: bool, find_absent: Callable[[], str]) -> None:
        """Sends the changes. Waits neither for the other processes nor for the device.

        If a parameter is not finite here, nothing of this process's round can be averaged: a NaN in
        all changes makes all processes drop it.

        Args:
            overlaps: Whether local steps are taken before ``finish``.
            find_absent: Function to call if the round fails, as of ``agreement.absent_from``.
        """
        anchors, parameters = _local(self.anchors), _local(self.parameters)
        changes, buffers = self._allocate(anchors)
        _subtract(_in_types_of(parameters, anchors), parameters, changes)
        begun_at = _copies(parameters, like=parameters) if overlaps else []
        sent = _zero_or_nan(buffers)
        firsts = [change.view(-1)[:1] for change in changes]
        # A list, because the host would wait for a single scalar.
        torch._foreach_add_(firsts, [sent.view(1)] * len(firsts))
        work = self.attachment.all_reduce(changes, find_absent)
        self._round = _Round(work, changes, buffers, begun_at, sent)

    def _allocate(self, like: List) -> tuple[List, List]:
        """Returns empty tensors, which lie side by side in a buffer for each bucket, and these."""
        tensors, buffers = {}, []
        assert self.attachment.tensors is not None
        for bucket in self.attachment.tensors.buckets:
            sizes = [like[i].numel() for i in bucket]
            buffers.append(like[bucket[0]].new_empty(sum(sizes)))
            for i, part in zip(bucket, buffers[-1].split(sizes), strict=True):
                tensors[i] = part.view(like[i].shape)
        return [tensors[i] for i in range(len(like))], buffers

    @torch.inference_mode(False)  # An outer optimizer keeps what it makes of the means.
    @torch.no_grad()
    def finish(self, update: Callable[[Fragment, Tensors], None]) -> tuple[str, bool]:
        """Waits for the means, and moves the anchors and the parameters.

        A parameter whose mean is not finite goes back to its anchor, as if there had been no round.

        Args:
            update: Function of the fragment and the finite means, which moves the anchors. The
                means are of what this process holds, as real numbers.

        Returns:
            The name of a parameter that was not finite here in ``begin``, or nothing, and whether
            any parameter goes back.
        """
        assert self._round is not None
        self._round.work.wait()
        done, self._round = self._round, None
        anchors, parameters = _local(self.anchors), _local(self.parameters)
        # The only wait of the host for the device, unless a number is not finite.
        sent, delivered = torch.stack([done.sent, _zero_or_nan(done.buffers)]).tolist()
        name = "" if sent == 0 else self._not_finite(done.begun_at or parameters)
        finite = [delivered == 0 or bool(mean.isfinite().all()) for mean in done.changes]
        named = zip(self.anchors, done.changes, finite, strict=True)
        update(self, {name: mean for name, mean, fits in named if fits})
        if done.begun_at:  # The steps since then are kept.
            torch._foreach_sub_(parameters, done.begun_at)
            torch._foreach_copy_(done.begun_at, anchors)
            torch._foreach_add_(parameters, done.begun_at)
        back = [i for i, fits in enumerate(finite) if not fits or not done.begun_at]
        if back:
            torch._foreach_copy_([parameters[i] for i in back], [anchors[i] for i in back])
        return name, not all(finite)

    def _not_finite(self, begun_at: List) -> str:
        """Returns the name of the first parameter whose change from its anchor is not finite."""
        for name, anchor, begun in zip(self.anchors, _local(self.anchors), begun_at, strict=True):
            if not (anchor.to(begun.dtype) - begun).isfinite().all():
                return name
        raise AssertionError("all changes are finite")

    def discard(self) -> None:
        """Ends a round in flight, and changes nothing."""
        if self._round is not None:
            self._round.work.wait()
        self._round = None

    @torch.no_grad()
    def restart(self) -> None:
        """Makes the parameters, which are equal on all processes, the anchors of a first round."""
        self.discard()
        states = self.attachment.reducer.states
        local = states.export_local()
        for of in local:
            for part in (of.memory, of.q_local):  # The residual is memory - p_hat q_local^T.
                if part is not None:
                    part.zero_()
        states.load_local(local, states.step)
        torch._foreach_copy_(_local(self.anchors), _local(self.parameters))

    def subtract(self, means: Tensors) -> None:
        """Moves the anchors to the mean of the processes' parameters."""
        if means:
            anchors = _local({name: self.anchors[name] for name in means})
            torch._foreach_sub_(anchors, [*means.values()])

    @torch.no_grad()
    def reset(self) -> None:
        """Sets the parameters to the anchors."""
        torch._foreach_copy_(_local(self.parameters), _local(self.anchors))


def reshard(model: torch.nn.Module) -> None:
    """Shards FSDP2's root, which a forward pass without a backward pass leaves whole."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in float32, or itself if its type is at least as wide."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def like_anchor(mean: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """Returns the mean of what this process holds of an anchor as a tensor like the anchor."""
    if anchor.is_complex():
        mean = torch.complex(*mean.unbind(-1))
    if isinstance(anchor, DTensor):
        mesh, shape, stride = anchor.device_mesh, anchor.shape, anchor.stride()
        mean = DTensor.from_local(
            mean, mesh, anchor.placements, run_check=False, shape=shape, stride=stride
        )
    return mean


def _local(tensors: Tensors) -> List:
    """What this process holds of tensors, as real numbers."""
    return [as_reals(shard_of(tensor)) for tensor in tensors.values()]


def _copies(tensors: List, like: List) -> List:
    """Returns copies in the types of other tensors."""
    copies = [torch.empty_like(tensor) for tensor in like]
    torch._foreach_copy_(copies, tensors)
    return copies


def _in_types_of(like: List, tensors: List) -> List:
    """Returns the tensors in the types of others: themselves, if all have those already."""
    same = all(a.dtype == b.dtype for a, b in zip(like, tensors, strict=True))
    return tensors if same else _copies(tensors, like)


def _subtract(minuends: List, subtrahends: List, differences: List) -> None:
    """Writes the differences, which may be of a wider type."""
    small = []
    for tensors in zip(minuends, subtrahends, differences, strict=True):
        minuend, subtrahend, difference = tensors
        if difference.numel() >= _LARGE and difference.dtype == minuend.dtype:
            torch.sub(minuend, subtrahend, out=difference)
        else:
            small.append(tensors)
    if small:  # No operator on lists writes to a third one.
        minuends, subtrahends, differences = map(list, zip(*small, strict=True))
        torch._foreach_copy_(differences, minuends)
        torch._foreach_sub_(differences, subtrahends)


def _zero_or_nan(tensors: List) -> torch.Tensor:
    """Returns NaN if a number is not finite, and otherwise -0.0, which added changes no number."""
    # The largest magnitude is exact, takes one pass, and an empty tensor has none.
    held = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(torch._foreach_norm(held, torch.inf)).amax() * -0.0
