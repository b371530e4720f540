# SPDX-License-Identifier: BSD-3-Clause
"""What a method trains: the model, wrapped as the method needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp

# The first steps, which every compressing method averages exactly.
EXACT_STEPS = 10
PLAIN = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
POWERSGD = {"cpu": "cpu:powersgd", "cuda": "cpu:gloo,cuda:powersgd"}


class Trainee:
    """A model that is trained alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.module = model  # the module to call
        self.compression: tp.Compression | None = None  # this project's, layer by layer
        self.hook_state: Any = None  # torch's PowerSGD hook's

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context, the gradients are the averages. Afterwards they are as before."""
        return contextlib.nullcontext()

    def clear(self) -> None:
        self.model.zero_grad()

    def optimized_by(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Sets the model's optimizer. Returns the one to call."""
        return optimizer

    def end(self) -> None:
        """Makes the models of all ranks equal at the end."""


class Parallel(Trainee):
    """A model in DistributedDataParallel, whose buckets hold the gradients themselves."""

    def __init__(self, model: nn.Module, **ddp: Any) -> None:
        super().__init__(model)
        self.module = self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **ddp)


class Author(Trainee):
    """github.com/epfml/powersgd, which averages after backward and keeps its residual in .grad."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        import powersgd

        super().__init__(model)
        self.parameters = list(model.parameters())
        config = powersgd.Config(rank=rank, start_compressing_after_num_steps=EXACT_STEPS)
        self.aggregator = powersgd.PowerSGD(self.parameters, config)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        residuals = [parameter.grad for parameter in self.parameters]
        averages = self.aggregator.aggregate(residuals)
        for parameter, average in zip(self.parameters, averages, strict=True):
            parameter.grad = average
        yield
        for parameter, residual in zip(self.parameters, residuals, strict=True):
            parameter.grad = residual

    def clear(self) -> None:
        """Keeps the residual in .grad, where backward adds the next gradient to it."""


# Arguments: the model, the matrix rank, and the seed of the random start.
Make = Callable[[nn.Module, int, int], Trainee]


@dataclass(frozen=True)
class Method:
    title: str
    make: Make
    options: Callable[[int, int], tp.Options] | None = None  # of its group; matrix rank, seed
    approximates: bool = True  # by factors of a matrix rank, or by local steps
    every: int | None = 1  # steps from one average to the next; None: given as the rank
    measure: str = "rank"  # what else than a matrix rank is given as the rank
    needs: str = ""  # a Python module
    one_level: bool = False  # sums as if each process were on a host of its own
    variables: Mapping[str, str] = field(default_factory=dict)  # of its processes' environment
    settings: tuple[str, ...] = ()  # what METHOD+SETTING=VALUE may set
    vary: Callable[..., Method] | None = None  # takes another title, and settings

    @property
    def backend(self) -> dict[str, str]:
        """The backend of its group, by device."""
        return POWERSGD if self.options else PLAIN
