# SPDX-License-Identifier: BSD-3-Clause
"""One round of some parameters: what has changed is sent, and its mean comes back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torch_powersgd.agreement import absent_from
from torch_powersgd.attach import compress
from torch_powersgd.local_steps import kept
from torch_powersgd.local_steps.recent_rounds import RecentRounds
from torch_powersgd.matrices import as_reals
from torch_powersgd.options import Options
from torch_powersgd.sparse import InFlight, Sparse
from torch_powersgd.targets import TensorsByName, shard_of

Tensors = dict[str, torch.Tensor]
List = list[torch.Tensor]


@dataclass(frozen=True)
class _Round:
    """A round in flight, of what this process holds, as real numbers.

    Attributes:
        work: Work that replaces the changes with their means, or an average of ``Sparse``, which
            returns them.
        compressed: Whether they are compressed.
        changes: Changes, in the order of the parameters.
        buffers: Memory of the changes.
        begun_at: Parameters when their changes were sent, if local steps overlap.
        sent: Number that was added to the changes: NaN if one was not finite, and otherwise -0.0.
        cosine: Cosine between the changes and the residual before the round; NaN if it was zero.
    """

    work: dist.Work | InFlight
    compressed: bool
    changes: List
    buffers: List
    begun_at: List
    sent: torch.Tensor
    cosine: torch.Tensor


class Fragment:
    """Parameters that are averaged together.

    Their *anchor* is the sum of all that the rounds have averaged, the same on all processes. Local
    steps start near it, and what is averaged is how far they have moved the parameters:
    start - parameter, which DiLoCo calls the pseudo-gradient. The anchor of a parameter narrower
    than float32 is in float32, so that small averages add up.

    After a compressed round, start = anchor - kept x residual, as ``kept.py`` says.
    After an exact round, all processes start from the anchor.

    Args:
        parameters: Trainable parameters by name, the same values on all processes.
        options: Options of the compression, as in ``attach``.
        group: Group to average over.
        family: Names of the parameters of all fragments.
        density: Share of the changes to send in place of factors, as of ``Sparse``.

    Attributes:
        kept: Share of the residual that the start holds.
        recent: The latest compressed rounds.
    """

    def __init__(
        self,
        parameters: Tensors,
        options: Options | Mapping[str, Any] | None,
        group: dist.ProcessGroup,
        family: Collection[str],
        density: float | None = None,
    ) -> None:
        self.parameters = parameters
        self.anchors = {name: at_least_float32(p).clone() for name, p in parameters.items()}
        target = TensorsByName(self.anchors, family)
        self.compression = compress(target, options, group, density=density)
        self.attachment = self.compression.attachment
        self.kept = 0.0
        self.recent = RecentRounds(sparse=density is not None)
        self._round: _Round | None = None

    @property
    def gradient_bytes(self) -> int:
        """The bytes that averaging the gradients in one step would send."""
        return sum(shard_of(parameter).nbytes for parameter in self.parameters.values())

    @property
    def sparse(self) -> Sparse | None:
        """What averages the changes in compressed rounds, if there is a density."""
        return self.attachment.sparse

    @property
    def round_bytes(self) -> int:
        """The bytes that a compressed round sends."""
        if self.sparse is not None:
            return self.sparse.nbytes
        return self.attachment.reducer.states.outline().bytes_after

    @property
    def in_flight(self) -> bool:
        """Whether a round has begun and not finished."""
        return self._round is not None

    @torch.inference_mode(False)
    @torch.no_grad()
    def begin(self, overlaps: bool, deed: str) -> None:
        """Sends the changes. Waits neither for the other processes nor for the device.

        If a parameter is not finite here, nothing of this process's round can be averaged: a NaN in
        all changes makes all processes drop it.

        Args:
            overlaps: Whether local steps are taken before ``finish``.
            deed: What this process does, as in ``agreement.absent_from``, if the round fails.
        """
        anchors, parameters = _local(self.anchors), _local(self.parameters)
        compressed = self.attachment.compressing
        sparse = self.sparse if compressed else None
        changes, buffers = sparse.allocate() if sparse else self._allocate(anchors)
        starts = changes if _same_types(parameters, anchors) else _empty(parameters)
        held = compressed or self.kept
        residuals = self.attachment.residual_holder.residuals() if held else [None] * len(changes)
        self._copy_starts(starts, residuals)
        if starts is not changes:
            torch._foreach_copy_(changes, starts)
        torch._foreach_sub_(changes, parameters)
        if self.kept and not compressed:  # The parameters are averaged, and all that they hold.
            kept.add(changes, residuals, self.kept)
        begun_at = _empty(parameters) if overlaps else []
        if overlaps:
            torch._foreach_copy_(begun_at, parameters)
        compared = residuals if self.sparse is None else [None] * len(changes)
        cosine = kept.cosine(changes, compared)
        sent = _zero_or_nan(buffers)
        firsts = [change.view(-1)[:1] for change in changes]
        # A list, because the host would wait for a single scalar.
        torch._foreach_add_(firsts, [sent.view(1)] * len(firsts))
        work: dist.Work | InFlight
        if sparse is not None:
            work = sparse.send(buffers, deed)
            self.attachment.reducer.end_step()
        else:
            find_absent = partial(absent_from, self.compression.group, deed)
            work = self.attachment.all_reduce(changes, find_absent)
        self._round = _Round(work, compressed, changes, buffers, begun_at, sent, cosine)

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

        A parameter whose mean is not finite goes back to where its local steps started, as if there
        had been no round.

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
        means, buffers, measure = done.changes, done.buffers, done.cosine
        if isinstance(done.work, InFlight):
            means, buffers, measure = done.work.receive()
        parameters = _local(self.parameters)
        # The only wait of the host for the device, unless a number is not finite.
        numbers = [done.sent, _zero_or_nan(buffers), measure]
        sent, delivered, measured = torch.stack(numbers).tolist()
        name = "" if sent == 0 else self._not_finite(done.begun_at or parameters)
        finite = [delivered == 0 or bool(mean.isfinite().all()) for mean in means]
        named = zip(self.anchors, means, finite, strict=True)
        update(self, {name: mean for name, mean, fits in named if fits})
        if isinstance(done.work, InFlight):
            done.work.keep(finite)
        if self.kept and not done.compressed:
            averaged = [i for i, fits in enumerate(finite) if fits]
            self.attachment.residual_holder.take_residuals(self.kept, averaged)
        if not done.compressed:
            self.kept = 0.0
        elif delivered == 0:
            if self.sparse is None:
                self.kept = kept.share(measured, self.kept)
                self.recent.add(self.kept)
            else:
                self.kept = kept.OF_SPARSE
                self.recent.add(measured)
        residuals = self.attachment.residual_holder.residuals() if self.kept else []
        if starts := done.begun_at:  # The steps since then are kept.
            torch._foreach_sub_(parameters, starts)
            self._copy_starts(starts, residuals)
            torch._foreach_add_(parameters, starts)
            if back := [i for i, fits in enumerate(finite) if not fits]:
                torch._foreach_copy_([parameters[i] for i in back], [starts[i] for i in back])
        else:
            self._copy_starts(parameters, residuals)
        return name, not all(finite)

    def _copy_starts(self, to: List, residuals: kept.Residuals) -> None:
        """Writes where local steps start to tensors like the parameters or the anchors."""
        anchors = _local(self.anchors)
        starts = to if not self.kept or _same_types(to, anchors) else _empty(anchors)
        torch._foreach_copy_(starts, anchors)
        if self.kept:
            kept.add(starts, residuals, -self.kept)
        if starts is not to:
            torch._foreach_copy_(to, starts)

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
        self.attachment.residual_holder.take_residuals(1, range(len(self.anchors)))
        self.kept = 0.0
        torch._foreach_copy_(_local(self.anchors), _local(self.parameters))

    def subtract(self, means: Tensors) -> None:
        """Moves the anchors to the mean of the processes' parameters."""
        if means:
            anchors = _local({name: self.anchors[name] for name in means})
            torch._foreach_sub_(anchors, [*means.values()])

    @torch.no_grad()
    def reset(self) -> None:
        """Sets the parameters to the anchors."""
        self.kept = 0.0
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


def _empty(like: List) -> List:
    return [torch.empty_like(tensor) for tensor in like]


def _same_types(tensors: List, others: List) -> bool:
    return all(a.dtype == b.dtype for a, b in zip(tensors, others, strict=True))


def _zero_or_nan(tensors: List) -> torch.Tensor:
    """Returns NaN if a number is not finite, and otherwise -0.0, which added changes no number."""
    # The largest magnitude is exact, takes one pass, and an empty tensor has none.
    held = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(torch._foreach_norm(held, torch.inf)).amax() * -0.0
