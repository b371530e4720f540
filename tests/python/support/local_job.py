# SPDX-License-Identifier: BSD-3-Clause
"""A small model that takes local steps, for tests of its state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torch_powersgd as tp
from support.synthetic import from_bytes, gradient, to_bytes

EVERY = 4
OPTIONS = {"matrix_approximation_rank": 2}


class Job:
    """A model that takes local steps, of any rank's data."""

    def __init__(self, outer: bool = False, **others: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        arguments: dict[str, Any] = {"fragments": 2, "warmup_steps": 0, **others}
        of_outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
        self.steps = (
            tp.DiLoCo(self.model, self.optimizer, of_outer, EVERY, OPTIONS, **arguments)
            if outer
            else tp.LocalSGD(self.model, self.optimizer, EVERY, OPTIONS, **arguments)
        )

    def train(self, rank: int, first: int, last: int) -> None:
        for i in range(first, last):
            self.optimizer.zero_grad()
            self.model(gradient((6, 24), "input", rank, i)).square().mean().backward()
            self.optimizer.step()

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
