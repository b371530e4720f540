# SPDX-License-Identifier: BSD-3-Clause
"""Shadow mode: training stays exact, and the compressor runs beside it on copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.agreement import next_call
from torch_powersgd.control import compression
from torch_powersgd.ddp import Hook, check_module, parameters_of, refuse_second_hook
from torch_powersgd.lookup import BACKENDS, find_backend
from torch_powersgd.options import Options, lay_over

RANKS = (1, 4, 16)
STEPS = 50


@dataclasses.dataclass(frozen=True)
class ShadowedLayer:
    """One parameter under one rank of the approximation.

    Attributes:
        name: Name of the parameter.
        shape: Shape of the parameter.
        rank: Rank of its factors. It is 0 if the parameter is sent raw.
        error: Error of its compressed gradients: the square root of sum |out - g|^2 / sum |g|^2
            over the steps. g is the average of the ranks' gradients, and out that of PowerSGD with
            error feedback. The error may exceed 1, as out also has what earlier steps left.
        bytes_before: Bytes of its gradient.
        bytes_after: Bytes that a step sends in its place.
        milliseconds: Milliseconds that the stages take for it alone, on the slowest rank.
    """

    name: str
    shape: tuple[int, ...]
    rank: int
    error: float
    bytes_before: int
    bytes_after: int
    milliseconds: float


class Shadow:
    """The compressors that run beside a model's exact training. ``shadow`` makes it.

    ``print(shadow)`` shows a table once it is done.

    Attributes:
        ranks: Ranks of the approximation that are compared.
        steps: Number of steps to take.
        step: Number of steps that were taken.
        layers: {rank: [ShadowedLayer of each parameter]}. It is empty until all steps are taken.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        options: Sequence[Options],
        steps: int,
    ) -> None:
        with refuse_second_hook():
            ddp.register_comm_hook(None, self._hook())
        self.ranks = tuple(each.matrix_approximation_rank for each in options)
        self.steps = steps
        self.step = 0
        self.layers: dict[int, list[ShadowedLayer]] = {}
        parameters = parameters_of(ddp)
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        self._options = list(options)
        self._averaging: dist.ProcessGroup = ddp.process_group
        device = self._parameters[0].device
        self._group = _group_beside(self._averaging, device)
        backend = find_backend(self._group, device)
        assert backend is not None
        self._models = [
            _C.AttachedModel(backend, self._names, self._parameters, each._core())
            for each in options
        ]
        # Squared norms by parameter: those of each model's errors, and of the gradients.
        count = len(self._parameters)
        self._errors = torch.zeros(len(options), count, dtype=torch.float64, device=device)
        self._gradients = torch.zeros(count, dtype=torch.float64, device=device)

    @property
    def done(self) -> bool:
        """True once all steps are taken."""
        return bool(self.layers)

    def error(self, rank: int) -> float:
        """Returns the error of the whole model at one of the ranks, as ``ShadowedLayer`` has it.

        Raises:
            ValueError: If the steps are not all taken, or the rank was not compared.
        """
        if not self.done:
            raise ValueError(f"shadow has taken {self.step} of {self.steps} steps")
        if rank not in self.ranks:
            raise ValueError(f"rank must be one of {list(self.ranks)}, got {rank}")
        errors = self._errors[self.ranks.index(rank)]
        return float((errors.sum() / self._gradients.sum()).sqrt())

    def __str__(self) -> str:
        if not self.done:
            return f"shadow has taken {self.step} of {self.steps} steps"
        from torch_powersgd.tools.shadow_table import table_of

        return table_of(self)

    def _hook(self) -> Hook:
        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(self._average(bucket))
            return future

        hook.__annotations__.clear()  # DDP compares them with types, and these are strings.
        return hook

    def _average(self, bucket: GradBucket) -> torch.Tensor:
        """Averages a bucket exactly, and lets every model compress a copy of it."""
        buffer = bucket.buffer()
        size = self._averaging.size()
        copies = [] if self.done else [buffer.clone() for _ in self._models]
        parameters = [self._index[id(p)] for p in bucket.parameters()]
        for model, copy in zip(self._models, copies, strict=False):
            model.reduce(bucket.index(), copy, parameters, size).wait()
        buffer.mul_(1 / size)  # as DDP does without a hook
        with compression(False):
            dist.all_reduce(buffer, group=self._averaging)
        if copies:
            self._compare(buffer, copies, parameters)
            if bucket.is_last():
                self._end_step()
        return buffer

    def _compare(
        self, exact: torch.Tensor, copies: list[torch.Tensor], parameters: list[int]
    ) -> None:
        offset = 0
        for i in parameters:
            part = slice(offset, offset + self._parameters[i].numel())
            offset = part.stop
            gradient = exact[part].double()
            _add_finite(self._gradients[i], gradient.square().sum())
            for errors, copy in zip(self._errors, copies, strict=True):
                _add_finite(errors[i], (copy[part].double() - gradient).square().sum())

    def _end_step(self) -> None:
        for model in self._models:
            model.end_step()
        self.step += 1
        if self.step < self.steps:
            return
        self._finish()
        if self._averaging.rank() == 0:
            errors = ", ".join(f"{self.error(rank):.2f} at rank {rank}" for rank in self.ranks)
            log.notice(f"error of the compressed gradients over {self.steps} steps: {errors}")

    def _finish(self) -> None:
        """Makes the layers' records, and gives the compressors' memory back."""
        from torch_powersgd.tools.costs import milliseconds_of

        for i, (model, options) in enumerate(zip(self._models, self._options, strict=True)):
            milliseconds = milliseconds_of(self._parameters, options, self._group)
            relative = (self._errors[i] / self._gradients).nan_to_num().sqrt().tolist()
            self.layers[self.ranks[i]] = [
                ShadowedLayer(
                    layer.name,
                    tuple(parameter.shape),
                    layer.rank,
                    error,
                    layer.bytes_before,
                    layer.bytes_after,
                    spent,
                )
                for layer, parameter, error, spent in zip(
                    model.layers(), self._parameters, relative, milliseconds, strict=True
                )
            ]
        self._models = []
        dist.destroy_process_group(self._group)


def shadow(
    ddp: DistributedDataParallel,
    ranks: Sequence[int] = RANKS,
    steps: int = STEPS,
    options: Options | Mapping[str, Any] | None = None,
) -> Shadow:
    """Measures the error that compression would make, while training stays exact. Collective.

    Train on as always. In each of the next ``steps`` synchronized backward passes, the gradients
    are averaged exactly, and PowerSGD compresses copies of them at each of the ranks. Its factors
    travel, so that these steps take longer. Afterwards ``print(shadow)`` shows the error, the bytes
    and the time of each layer at each rank, and training goes on exactly.

    The module's group needs no powersgd backend. Its one communication hook is taken, so wrap the
    model in DDP anew to attach it.

    Args:
        ddp: DDP module without a communication hook.
        ranks: Ranks of the approximation to compare.
        steps: Number of synchronized backward passes.
        options: Some fields of ``Options`` as a mapping, or a complete ``Options``, for all else
            than the rank. None is ``Options.recommended()``.

    Returns:
        The shadow, whose ``layers`` and ``error`` have the numbers.

    Raises:
        ValueError: If an argument is invalid or the ranks' arguments differ, on every rank.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"shadow takes a DistributedDataParallel module, got {type(ddp).__name__}")
    mine: dict[str, Any] = {}
    compared: list[Options] = []
    try:
        compared = _options_of(ranks, steps, options)
        check_module(ddp)
        if ddp.process_group.size() == 1:
            raise ValueError("shadow needs a group of at least two ranks, got one")
        mine = {"steps": steps, "options": [each._plain() for each in compared]}
    except (TypeError, ValueError) as error:
        mine = {"error": str(error)}
    next_call(ddp.process_group, "shadow", default_pg_timeout).agree(mine, _compare_arguments)
    return Shadow(ddp, compared, steps)


def _add_finite(total: torch.Tensor, value: torch.Tensor) -> None:
    """Adds it, unless the gradient has overflowed: then PowerSGD skips the step."""
    total += torch.where(value.isfinite(), value, 0)


def _options_of(
    ranks: Sequence[int], steps: int, given: Options | Mapping[str, Any] | None
) -> list[Options]:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {steps!r}")
    if len(ranks) == 0 or len(set(ranks)) < len(ranks):
        raise ValueError(f"ranks must be different whole numbers, got {list(ranks)}")
    base = lay_over(Options.recommended(), given, "options of shadow")
    return [
        dataclasses.replace(base, matrix_approximation_rank=rank, start_powerSGD_iter=0)
        for rank in ranks
    ]


def _compare_arguments(everyone: list[dict[str, Any]]) -> str:
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            return f"the arguments of shadow on rank {rank} differ from rank 0's"
    return ""


def _group_beside(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Makes a powersgd group of the same ranks, whose counts and models are its own."""
    members = dist.get_process_group_ranks(group)
    made = dist.new_group(members, backend=BACKENDS[device.type], use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made
