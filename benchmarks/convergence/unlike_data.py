# SPDX-License-Identifier: BSD-3-Clause
"""Measures the residual and the distance from the optimum when processes have different data.

SGD minimizes the mean over two processes of |x - c_rank|^2 / 2, with noisy gradients. The optimum
is the mean of the c, which are far apart. Near it, a process's gradient is almost all disagreement,
which no step can remove. x is float32. The gradients are computed, averaged and compressed in
float32 or bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster.trainees import EXACT_STEPS, Trainee
from report import Record, Table, in_turn, processor, provenance
from torch import Tensor, nn

from convergence import pictures, ranks, tables

CONTENDERS = ("plain", "hook-1-bucket", "attached")
DTYPES = ("float32", "bfloat16")
SHAPE = (16, 40)
LEARNING_RATE = 0.05
APART = 5.0  # standard deviation of c; that of the optimum is 1
NOISE = 0.5
SAMPLE_EVERY = 10  # steps
LAST = 10  # samples whose mean is the distance at the end
KEPT = 5  # every KEPT-th sample is in the record, for the plot

draw = pictures.draw_unlike_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="number of steps (2000)")
    add("--rank", type=int, default=2, help="matrix rank (2)")
    add("--quick", action="store_true", help="take 100 steps")
    add("--picture", type=Path, help="file for the picture")


def tables_of(record: Record) -> dict[str, Table]:
    title = f"unlike data on two ranks, {record['steps']} steps, rank {record['rank']}"
    return {title: tables.unlike_data(record)}


def measure(arguments: argparse.Namespace) -> Record:
    steps = 100 if arguments.quick else arguments.steps
    todo = [(method, dtype) for dtype in DTYPES for method in CONTENDERS]
    runs = [
        {
            "method": method,
            "dtype": dtype,
            **_figures(*ranks.run(descend, method, arguments.rank, 0, dtype, steps)),
        }
        for method, dtype in in_turn(todo, ", ".join)
    ]
    return {
        **provenance(processor()),
        "shape": SHAPE,
        "rank": arguments.rank,
        "steps": steps,
        "exact_steps": EXACT_STEPS,
        "sample_every": KEPT * SAMPLE_EVERY,
        "runs": runs,
    }


def _figures(ratios: list[float | None], distances: list[float]) -> dict[str, Any]:
    """The largest and the last residual / gradient, and the final distance."""
    known = [ratio for ratio in ratios if ratio is not None]
    return {
        "largest_ratio": max(known, default=None),
        "last_ratio": ratios[-1],
        "last_distance": round(statistics.mean(distances[-LAST:]), 4),
        "ratios": ratios[KEPT - 1 :: KEPT],
        "distances": distances[KEPT - 1 :: KEPT],
    }


class Linear(nn.Module):
    """A module whose gradient is the argument of its forward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def residual_norm(trainee: Trainee) -> float | None:
    """The norm of this process's residual, or None if there is no residual yet."""
    state = getattr(trainee, "hook_state", None)
    if state is not None:
        return max((float(e.float().norm()) for e in state.error_dict.values()), default=None)
    if trainee.compression is None:
        return None
    return max(trainee.compression.stats()["residual_norms"].values(), default=None)


def descend(make: ranks.Make, dtype: str, steps: int) -> tuple[list[float | None], list[float]]:
    """Runs SGD on this rank. Returns samples of residual / gradient and of the distance."""
    rank = dist.get_rank()
    common = torch.Generator().manual_seed(0)
    optimum = torch.randn(SHAPE, generator=common)
    center = optimum + APART * torch.randn(SHAPE, generator=common) * (1 if rank == 0 else -1)
    own = torch.Generator().manual_seed(1 + rank)
    model = Linear(getattr(torch, dtype))
    trainee, weight = make(model), model.weight
    x = torch.zeros(SHAPE)
    ratios: list[float | None] = []
    distances: list[float] = []
    for step in range(1, steps + 1):
        gradient = (x - center + NOISE * torch.randn(SHAPE, generator=own)).to(weight.dtype)
        weight.grad = None
        trainee.module(gradient).backward()
        assert weight.grad is not None
        x -= LEARNING_RATE * weight.grad.float()
        if step % SAMPLE_EVERY == 0:
            residual = residual_norm(trainee)
            norm = float(gradient.float().norm())
            ratios.append(None if residual is None else round(residual / norm, 4))
            distances.append(round(float((x - optimum).norm()), 4))
    return ratios, distances
