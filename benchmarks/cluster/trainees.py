# SPDX-License-Identifier: BSD-3-Clause
"""What a method trains: the model, wrapped as the method needs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
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
        self.optimizer: torch.optim.Optimizer | None = None  # if the method has its own
        self.compression: tp.Compression | None = None  # this project's, layer by layer

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
        self.hook_state: Any = None  # torch's PowerSGD hook's


# Arguments: the model, the matrix rank, and the seed of the random start.
Make = Callable[[nn.Module, int, int], Trainee]


@dataclass(frozen=True)
class Method:
    title: str
    backend: dict[str, str]
    make: Make
    options: Callable[[int, int], tp.Options] | None = None  # of the group; matrix rank, seed
    lacks: Callable[[], str] = lambda: ""  # why it cannot run here
    attached: bool = False  # this project's, layer by layer
    approximates: bool = True  # by factors of a matrix rank, or by what `measure` names
    measure: str = "rank"
    # By the matrix rank: the number of steps from one average to the next.
    every: Callable[[int], int] = lambda rank: 1
    fields: Mapping[str, Any] = field(default_factory=dict)  # options that are not the default
    variables: Mapping[str, str] = field(default_factory=dict)  # of its processes' environment


def refusal(options: Callable[[int, int], tp.Options]) -> str:
    """Why a method's options are not allowed, or an empty string."""
    try:
        options(1, 0)
    except ValueError as error:
        return str(error)
    return ""
