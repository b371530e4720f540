# SPDX-License-Identifier: BSD-3-Clause
"""Muon, https://kellerjordan.github.io/posts/muon, as torch.optim.Muon but in float32.

The original computes in bfloat16, which most CPUs do slowly.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_MOMENTUM = 0.95


def orthogonalized(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with singular values near one, by Newton-Schulz iterations."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: torch.Tensor = x if wide is matrix else x.T
    return found


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum. Its learning rates are those of AdamW."""

    def __init__(self, parameters: list[nn.Parameter], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": 1e-3, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - _MOMENTUM)
                update = orthogonalized(parameter.grad.lerp(momentum, _MOMENTUM))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                step = 0.2 * math.sqrt(max(parameter.shape)) * group["lr"]
                parameter.sub_(update, alpha=step)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside a model; AdamW for the rest, with the same learning rate."""

    def __init__(self, model: nn.Module) -> None:
        modules = [*model.modules()]
        ends = [m for m in modules if isinstance(m, nn.Embedding)] + modules[-1:]
        outer = {parameter for module in ends for parameter in module.parameters()}
        inner = [p for p in model.parameters() if p.ndim == 2 and p not in outer]
        rest = [p for p in model.parameters() if p.ndim != 2 or p in outer]
        super().__init__(model.parameters(), {})
        adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self._both = [Muon(inner, weight_decay=0.1), adamw]
        self.param_groups = [group for one in self._both for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self._both:
            one.step()
