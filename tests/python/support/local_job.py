# SPDX-License-Identifier: BSD-3-Clause
"""A small model, and a job in which it takes local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_powersgd as tp
from support.states import from_bytes, to_bytes
from support.synthetic import gradient

EVERY = 4
OPTIONS = {"matrix_approximation_rank": 2}
EXACT = {"scope": "never"}  # rounds that leave the models equal


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def backward(model: nn.Module, rank: int, i: int, scale: float = 1.0) -> None:
    """The gradients of a rank at a step, of a loss with this scale."""
    model.zero_grad()
    (model(gradient((6, 24), "input", rank, i)).square().mean() * scale).backward()


def take_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, i: int, scale: float = 1.0
) -> None:
    backward(model, rank, i, scale)
    optimizer.step()


class Job:
    """A model that takes local steps, of any rank's data."""

    def __init__(
        self,
        outer: bool = False,
        momentum: float = 0.5,
        make: Callable[[], nn.Module] = make_net,
        **others: Any,
    ) -> None:
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        arguments: dict[str, Any] = {"fragments": 2, "warmup_steps": 0, **others}
        of_outer = torch.optim.SGD(
            self.model.parameters(), lr=0.7, momentum=momentum, nesterov=momentum > 0
        )
        self.steps = (
            tp.DiLoCo(self.model, self.optimizer, of_outer, EVERY, OPTIONS, **arguments)
            if outer
            else tp.LocalSGD(self.model, self.optimizer, EVERY, OPTIONS, **arguments)
        )

    def train(self, rank: int, first: int, last: int) -> None:
        for i in range(first, last):
            take_step(self.model, self.optimizer, rank, i)

    def save(self) -> bytes:
        return to_bytes(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "steps": self.steps.per_rank.state_dict(),
            }
        )

    def load(self, saved: bytes) -> None:
        state = from_bytes(saved)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps.per_rank.load_state_dict(state["steps"])
