# SPDX-License-Identifier: BSD-3-Clause
"""Shadow mode: training stays exact, and the compressor runs on copies of the gradients."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.agreement import agree, equality_of
from torch_powersgd.group_backends import BACKENDS, find_backend
from torch_powersgd.matrices import as_reals
from torch_powersgd.option_values import require
from torch_powersgd.options import Options, check_matrix_ranks, lay_over, to_core, to_plain
from torch_powersgd.scope import scope
from torch_powersgd.targets.ddp import DdpTarget, Hook

RANKS = (1, 4, 16)
STEPS = 50


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
        parameters: Parameters whose gradients are compressed.
        models: The compressor of each setting.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        options: Sequence[Options],
        averaging: dist.ProcessGroup,
    ) -> None:
        self.parameters = list(parameters.values())
        self._averaging = averaging
        device = self.parameters[0].device
        self._group = _group_beside(averaging, device)
        backend = find_backend(self._group, device)
        assert backend is not None
        named = list(parameters), self.parameters
        self.models = [_C.BucketReducer(backend, *named, to_core(each)) for each in options]
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
            model.reduce(bucket, copy, parameters, self._averaging.size()).wait()
        average_exactly(buffer, self._averaging)
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
        dist.destroy_process_group(self._group)


class Shadow:
    """The compressors that run alongside a model's exact training. ``shadow`` returns it.

    ``print(shadow)`` shows the errors once it is done.

    Attributes:
        ranks: Ranks of the approximation that are compared.
        steps: Number of steps to take.
        step: Number of steps that were taken.
        layers: {rank: [ShadowedLayer of each parameter]}. It is empty until all steps are taken.
    """

    def __init__(
        self, ddp: DistributedDataParallel, options: Sequence[Options], steps: int
    ) -> None:
        ddp.register_comm_hook(None, self._hook())
        self.ranks = tuple(each.matrix_approximation_rank for each in options)
        self.steps = steps
        self.step = 0
        self.layers: dict[int, list[ShadowedLayer]] = {}
        self._errors: dict[int, float] = {}
        self._averaging: dist.ProcessGroup = ddp.process_group
        target = DdpTarget(ddp)
        self._comparison = Comparison(target.parameters(), options, self._averaging)
        self._index = target.index()

    @property
    def done(self) -> bool:
        """True once all steps are taken."""
        return self.step == self.steps

    def error(self, rank: int) -> float:
        """Returns the whole model's error at one of the ranks, as ``ShadowedLayer`` defines it.

        Raises:
            ValueError: If the steps are not all taken, or the rank was not compared.
        """
        if not self.done:
            raise ValueError(f"shadow has taken {self.step} of {self.steps} steps")
        if rank not in self.ranks:
            raise ValueError(f"rank must be one of {list(self.ranks)}, got {rank}")
        return self._errors[rank]

    def __str__(self) -> str:
        if not self.done:
            return f"shadow has taken {self.step} of {self.steps} steps"
        errors = ", ".join(
            f"{error:.3f} at matrix rank {rank}" for rank, error in self._errors.items()
        )
        found = f"error of the compressed gradients over {self.steps} steps: {errors}"
        if self.falls:
            return found
        return (
            f"{found}. They don't fall with the matrix rank, so they don't say which loss is "
            "lower: measure later in training, or compare the losses of short runs"
        )

    @property
    def falls(self) -> bool:
        """Whether the error of each matrix rank is at most that of the next lower one."""
        by_rank = [error for _, error in sorted(self._errors.items())]
        return all(lower >= higher for lower, higher in itertools.pairwise(by_rank))

    def _hook(self) -> Hook:
        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            average = self._average(bucket)
            devices: list[int | str | torch.device] = [] if average.is_cpu else [average.device]
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
            future.set_result(average)
            return future

        hook.__annotations__.clear()  # DDP compares them with types, and these are strings.
        return hook

    def _average(self, bucket: GradBucket) -> torch.Tensor:
        buffer = bucket.buffer()
        if self.done:
            average_exactly(buffer, self._averaging)
            return buffer
        parameters = [self._index[p] for p in bucket.parameters()]
        self._comparison.average(bucket.index(), buffer, parameters)
        if bucket.is_last():
            self._comparison.end_step()
            self.step += 1
            if self.done:
                self._finish()
        return buffer

    def _finish(self) -> None:
        """Makes the layers' records, and reports what was found."""
        found = self._comparison
        self._errors = dict(zip(self.ranks, found.errors(), strict=True))
        of_parameters = found.errors_of_parameters()
        for rank, model, errors in zip(self.ranks, found.models, of_parameters, strict=True):
            self.layers[rank] = [
                ShadowedLayer(
                    layer.name,
                    tuple(parameter.shape),
                    layer.rank,
                    error,
                    layer.bytes_before,
                    layer.bytes_after,
                )
                for layer, parameter, error in zip(
                    model.states.layers(), found.parameters, errors, strict=True
                )
            ]
        found.close()
        if self._averaging.rank() == 0:
            log.notice(str(self))


def shadow(
    ddp: DistributedDataParallel,
    ranks: Sequence[int] = RANKS,
    steps: int = STEPS,
    options: Options | Mapping[str, Any] | None = None,
) -> Shadow:
    """Measures the error that compression would make, while training stays exact. Collective.

    Keep training as usual. In each of the next ``steps`` synchronized backward passes, the
    gradients are averaged exactly, and PowerSGD compresses copies of them at each of the ranks. Its
    factors are sent, so these steps take longer. Afterwards ``print(shadow)`` shows the error at
    each rank, ``layers`` has that of each parameter, and training continues exactly.

    The module's group needs no powersgd backend. This takes the module's only communication hook,
    so wrap the model in DDP again before you attach it.

    Args:
        ddp: DDP module without a communication hook.
        ranks: Ranks of the approximation to compare.
        steps: Number of synchronized backward passes.
        options: Some fields of ``Options`` as a mapping, or a complete ``Options``, for everything
            except the rank. None is ``Options()``.

    Returns:
        The shadow, whose ``layers`` and ``error`` have the numbers.

    Raises:
        ValueError: If an argument is invalid or the ranks' arguments differ, on every rank.
    """
    fits = isinstance(ddp, DistributedDataParallel)
    require(fits, "ddp", "a DistributedDataParallel module", type(ddp))

    def make() -> tuple[list[Options], dict[str, Any]]:
        compared = _options_of(ranks, steps, options)
        target = DdpTarget(ddp)
        target.check()
        target.check_hook(replaceable="")
        check_matrix_ranks(compared[0], target.parameters())
        if ddp.process_group.size() == 1:
            raise ValueError("shadow needs a group of at least two ranks, got one")
        return compared, {**to_plain(compared[0]), "ranks": list(ranks), "steps": steps}

    compare = equality_of("the arguments of shadow")
    compared, _ = agree(ddp.process_group, "shadow", make, compare)
    return Shadow(ddp, compared, steps)


def _options_of(
    ranks: Sequence[int], steps: int, given: Options | Mapping[str, Any] | None
) -> list[Options]:
    require(isinstance(steps, int) and steps >= 1, "steps", "an integer >= 1", steps)
    fits = 0 < len(set(ranks)) == len(ranks)
    require(fits, "ranks", "one or more distinct integers >= 1", list(ranks))
    base = lay_over(Options(), given, "options of shadow")
    return [
        dataclasses.replace(base, matrix_approximation_rank=rank, start_powerSGD_iter=0)
        for rank in ranks
    ]


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
