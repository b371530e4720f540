# SPDX-License-Identifier: BSD-3-Clause
"""The same training twice in one job: by an attached module, and by plain DDP over Gloo.

Before each compressed step the plain module takes over the parameters and buffers of the attached
one. Its gradients are then the mean gradients that the attached module would have without
compression, bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.call_observer import gloo
from support.synthetic import Ledger, Tensors
from torch_powersgd.tools.footprint import as_reals

STEPS = 9
WARM_UP = 3  # steps that are exact
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=WARM_UP, matrix_approximation_rank=2)

# Makes the module, given the process group that it trains in.
Make = Callable[[dist.ProcessGroup], torch.nn.Module]
# Takes a module, this rank and a step; returns the loss and the inputs of the forward pass.
Loss = Callable[[Any, int, int], tuple[torch.Tensor, list[torch.Tensor]]]


def same(a: Iterable[torch.Tensor | None], b: Iterable[torch.Tensor | None]) -> bool:
    """True if both hold the same tensors, bit for bit; NaN equals NaN."""
    return all(
        x is y or (x is not None and y is not None and _bytes(x) == _bytes(y))
        for x, y in zip(a, b, strict=True)
    )


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(map(_bytes, tensors))).hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@dataclass
class Facts:
    """The facts that a rank has found."""

    # By step: whether both modules have the same gradients in warm-up; the same loss, buffers and
    # gradients of the inputs; the same gradients after warm-up.
    warm_up: list[bool] = field(default_factory=list)
    exact: list[bool] = field(default_factory=list)
    compressed: list[bool] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)  # of the identity, by parameter
    replica: list[str] = field(default_factory=list)  # digest of gradients and parameters, by step
    extra: Any = None


class TrainingPair:
    """The two modules, which begin with the same parameters."""

    def __init__(
        self,
        make: Make,
        wrap: Callable[[DistributedDataParallel], Any] = lambda ddp: ddp,
        **ddp_arguments: Any,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.modules: list[DistributedDataParallel] = []
        self.callables: list[Any] = []
        for group in (world, gloo()):
            torch.manual_seed(0)
            ddp = DistributedDataParallel(make(group), process_group=group, **ddp_arguments)
            if group is world:
                self.compression = tp.attach(ddp, OPTIONS)
            self.modules.append(ddp)
            self.callables.append(wrap(ddp))
        self.attached, self.plain = self.modules
        self.facts, self.ledger, self.steps = Facts(), Ledger(), 0

    def equalize(self) -> None:
        """The plain module takes over the attached one's parameters and buffers after warm-up.

        During warm-up both have the same anyway.
        """
        if self.steps < WARM_UP:
            return
        with torch.no_grad():
            pairs = zip(_state(self.plain), _state(self.attached), strict=True)
            for mine, other in pairs:
                mine.copy_(other)

    def record(self, exact: bool) -> None:
        """Compares the gradients of both after a backward pass and begins the next step."""
        found, wanted = (self.gradients(ddp) for ddp in self.modules)
        assert found.keys() == wanted.keys()
        self.ledger.add(found, {name: gradient.double() for name, gradient in wanted.items()})
        equal = same(found.values(), wanted.values())
        (self.facts.warm_up if self.steps < WARM_UP else self.facts.compressed).append(equal)
        self.facts.exact.append(exact)
        self.facts.replica.append(digest([*found.values(), *self.attached.parameters()]))
        self.steps += 1

    def residuals(self) -> Tensors:
        """The mean residual of each compressed parameter. Collective."""
        saved = self.compression.state_dict()["parameters"]
        return {name: state["residual"].double() for name, state in saved.items()}

    def gradients(self, ddp: DistributedDataParallel) -> Tensors:
        """The gradients by name. Complex ones are pairs of real numbers, as they are reduced."""
        return {
            name: as_reals(_dense(parameter.grad.detach())).clone()
            for name, parameter in ddp.module.named_parameters()
            if parameter.grad is not None
        }

    def finish(self) -> Facts:
        residuals = self.residuals()
        assert residuals, "nothing was compressed"
        self.facts.errors = self.ledger.errors(residuals)
        return self.facts


def train(
    pair: TrainingPair, loss_of: Loss, rank: int, steps: int = STEPS, clip: float = 0
) -> Facts:
    """Trains both by SGD.

    Args:
        clip: the largest norm of the gradients; 0 clips nothing.
    """
    norms = []
    for i in range(steps):
        pair.equalize()
        seen = []
        for ddp, forward in zip(pair.modules, pair.callables, strict=True):
            ddp.zero_grad()
            torch.manual_seed(100 * i + rank)
            loss, inputs = loss_of(forward, rank, i)
            loss.backward()
            seen.append([loss, *ddp.buffers(), *(x.grad for x in inputs)])
        pair.record(same(*seen))
        for ddp in pair.modules:
            if clip:
                norms.append(torch.nn.utils.clip_grad_norm_(ddp.parameters(), clip).item())
            descend(ddp)
    pair.facts.extra = norms
    return pair.finish()


def descend(ddp: torch.nn.Module, rate: float = 0.05) -> None:
    with torch.no_grad():
        for parameter in ddp.parameters():
            if parameter.grad is not None:
                parameter.sub_(_dense(parameter.grad), alpha=rate)


def _state(ddp: torch.nn.Module) -> list[torch.Tensor]:
    return [*ddp.parameters(), *ddp.buffers()]


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor
