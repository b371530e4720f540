# SPDX-License-Identifier: BSD-3-Clause
"""What local steps average whole: buffers, and frozen parameters that the loop has changed."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist

from torch_powersgd import log
from torch_powersgd.agreement import naming_absent
from torch_powersgd.local_steps.fragment import Tensors, at_least_float32
from torch_powersgd.scope import scope
from torch_powersgd.targets import shard_of

_SAMPLES = 64  # of each frozen parameter


class Buffers:
    """The buffers of a model that rounds average.

    Args:
        model: Model that takes local steps.
        names: Their names.
        group: Group to average over.

    Attributes:
        sent: The bytes sent so far.
        sent_in_rounds: Of these, the bytes sent beside compressed rounds.
    """

    def __init__(
        self, model: torch.nn.Module, names: Collection[str], group: dist.ProcessGroup
    ) -> None:
        self._model, self._names, self._group = model, frozenset(names), group
        self.sent = self.sent_in_rounds = 0

    @property
    def nbytes(self) -> int:
        """The bytes that one average sends."""
        return sum(at_least_float32(buffer).nbytes for buffer in self._tensors().values())

    def average(self, after: str, compressed: bool) -> None:
        """Averages the buffers.

        Args:
            after: What the average comes after, such as "round 3 of LocalSGD".
            compressed: Whether that was a compressed round.
        """
        with naming_absent(self._group, f"averaged the buffers after {after}"):
            sent, mended = average_exactly(self._tensors(), self._group)
        self.sent += sent
        self.sent_in_rounds += sent * compressed
        if mended:
            log.warning(
                f"{mended[0]!r} is not finite on rank {self._group.rank()}: it gets the mean of "
                "the ranks where it is"
            )

    def _tensors(self) -> Tensors:
        # By name, because a module may replace a buffer.
        named = self._model.named_buffers()
        return {name: buffer for name, buffer in named if name in self._names}


class Frozen:
    """The frozen parameters of a model, which a loop may change, as it does an EMA teacher's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._samples = {name: _sample(tensor) for name, tensor in self._tensors().items()}

    def changed(self) -> list[str]:
        """Returns the names of those that have changed since the beginning."""
        tensors = self._tensors()
        return [
            name
            for name, sample in self._samples.items()
            if name in tensors and not torch.equal(_sample(tensors[name]), sample)
        ]

    def average(self, names: Collection[str], group: dist.ProcessGroup) -> int:
        """Averages those with these names. Returns the bytes sent."""
        tensors = {name: tensor for name, tensor in self._tensors().items() if name in names}
        return average_exactly(tensors, group)[0]

    def _tensors(self) -> Tensors:
        return {
            name: shard_of(parameter.detach())
            for name, parameter in self._model.named_parameters()
            if not parameter.requires_grad and parameter.is_floating_point()
        }


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone()


@torch.no_grad()
def average_exactly(tensors: Tensors, group: dist.ProcessGroup) -> tuple[int, list[str]]:
    """Averages tensors in place, each number over the processes where it is finite.

    Returns:
        The bytes sent, and the names of the tensors that had numbers here that are not finite, and
        got those of other processes.
    """
    if not tensors:
        return 0, []
    sizes = [tensor.numel() for tensor in tensors.values()]
    flat = torch.cat([at_least_float32(tensor).reshape(-1) for tensor in tensors.values()])
    finite = flat.isfinite()
    sums = torch.cat([flat.where(finite, 0), finite.logical_not().any().to(flat.dtype).view(1)])
    counts: torch.Tensor | int = group.size()
    sent = sums.nbytes
    with scope("never"):
        dist.all_reduce(sums, group=group)
        if any_missing := bool(sums[-1] > 0):
            counts = finite.to(flat.dtype)
            dist.all_reduce(counts, group=group)
            sent += counts.nbytes
    means = sums[:-1] / counts
    averaged = means.isfinite()
    parts = torch.where(averaged, means, flat).split(sizes)
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors.values(), strict=True)]
    torch._foreach_copy_([*tensors.values()], shaped)
    if not any_missing:
        return sent, []
    mended = [part.any() for part in (averaged & ~finite).split(sizes)]
    found = zip(tensors, torch.stack(mended).tolist(), strict=True)
    return sent, [name for name, mends in found if mends]
