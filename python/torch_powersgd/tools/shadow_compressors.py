# SPDX-License-Identifier: BSD-3-Clause
"""Compressors at several settings alongside an exact average, and their errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_powersgd._core import _C
from torch_powersgd.group_backends import BACKENDS, find_backend
from torch_powersgd.matrices import as_reals
from torch_powersgd.options import Options, to_core
from torch_powersgd.scope import scope


@dataclass(frozen=True)
class ShadowedLayer:
    """One parameter under one rank of the approximation.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the parameter.
        rank: Rank of its factors. It is 0 if the parameter is sent raw.
        error: Error of its compressed gradients: the square root of sum |out - g|^2 / sum |g|^2
            over the steps. g is the average of the ranks' gradients, and out is PowerSGD's, with
            error feedback. The error may exceed 1, because out also has what earlier steps left.
        bytes_before: Bytes of its gradient.
        bytes_after: Bytes that a step sends in its place.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    error: float
    bytes_before: int
    bytes_after: int


class Comparison:
    """Compressors of one model at several settings, and their errors.

    Attributes:
        names: Names of the parameters.
        parameters: Parameters whose gradients are compressed.
        options: Settings that are compared.
        averaging: Group over which the gradients are averaged.
        group: Powersgd group of the same ranks, over which the factors are summed.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        options: Sequence[Options],
        averaging: dist.ProcessGroup,
    ) -> None:
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        self.options = list(options)
        self.averaging = averaging
        device = self.parameters[0].device
        self.group = _group_beside(averaging, device)
        backend = find_backend(self.group, device)
        assert backend is not None
        self.models = [
            _C.BucketReducer(backend, self.names, self.parameters, to_core(each))
            for each in options
        ]
        self._sizes = [as_reals(parameter).numel() for parameter in self.parameters]
        # Squared norms by parameter, of each setting's errors and of the gradients.
        count = len(self.parameters)
        self._errors = torch.zeros(len(options), count, dtype=torch.float64, device=device)
        self._gradients = torch.zeros(count, dtype=torch.float64, device=device)

    def average(self, bucket: int, buffer: torch.Tensor, parameters: list[int]) -> None:
        """Averages the buffer over the ranks in place, and compares each setting's average.

        Args:
            bucket: Number of the buffer in the backward pass.
            buffer: Gradients of some parameters, one after the other.
            parameters: Places of these parameters in ``self.parameters``.
        """
        copies = [buffer.clone() for _ in self.models]
        for model, copy in zip(self.models, copies, strict=True):
            model.reduce(bucket, copy, parameters, self.averaging.size()).wait()
        average_exactly(buffer, self.averaging)
        sizes = [self._sizes[i] for i in parameters]
        outputs = [copy.split(sizes) for copy in copies]
        for place, (i, exact) in enumerate(zip(parameters, buffer.split(sizes), strict=True)):
            gradient = exact.double()
            _add_finite(self._gradients[i], gradient.square().sum())
            for errors, output in zip(self._errors, outputs, strict=True):
                _add_finite(errors[i], (output[place].double() - gradient).square().sum())

    def end_step(self) -> None:
        """Ends a backward pass, after its last bucket."""
        for model in self.models:
            model.end_step()

    def errors(self) -> list[float]:
        """Returns the error of the whole model under each setting."""
        ratios: list[float] = (self._errors.sum(1) / self._gradients.sum()).sqrt().tolist()
        return ratios

    def errors_of_parameters(self) -> list[list[float]]:
        """Returns the error of each parameter under each setting. It is 0 without gradients."""
        ratios: list[list[float]] = (self._errors / self._gradients).nan_to_num().sqrt().tolist()
        return ratios

    def close(self) -> None:
        """Frees the compressors' memory and their group."""
        self.models = []
        dist.destroy_process_group(self.group)


def average_exactly(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Averages the buffer over the group in place, bitwise as DDP does without a hook."""
    buffer.mul_(1 / group.size())
    with scope("never"):
        dist.all_reduce(buffer, group=group)


def _add_finite(total: torch.Tensor, value: torch.Tensor) -> None:
    """Adds the value, unless the gradient overflowed: PowerSGD skips that step."""
    total += torch.where(value.isfinite(), value, 0)


def _group_beside(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Makes a powersgd group of the same ranks, with its own counts and models."""
    members = dist.get_process_group_ranks(group)
    made = dist.new_group(members, backend=BACKENDS[device.type], use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
