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

import torch
from cluster.methods import Contender
from cluster.rank import group
from cluster.trainees import EXACT_STEPS, Trainee
from launcher import ranks
from report import Record, Table, in_turn, provenance
from torch import Tensor, nn

from convergence import tables
from convergence.losses import LIMIT_SECONDS

CONTENDERS = ("plain", "hook-1-bucket", "attached")
DTYPES = ("float32", "bfloat16")
SHAPE = (16, 40)
LEARNING_RATE = 0.05
APART = 5.0  # standard deviation of c; that of the optimum is 1
NOISE = 0.5
SAMPLE_EVERY = 10  # steps
LAST = 10  # samples whose mean is the distance at the end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=2000, help="number of steps (2000)")
    parser.add_argument("--rank", type=int, default=2, help="matrix rank (2)")


def tables_of(record: Record) -> dict[str, Table]:
    title = f"unlike data on two ranks, {record['steps']} steps, rank {record['rank']}"
    return {title: tables.unlike_data(record)}


def measure(arguments: argparse.Namespace) -> Record:
    steps = arguments.steps
    record: Record = {
        **provenance(),
        "shape": SHAPE,
        "rank": arguments.rank,
        "steps": steps,
        "exact_steps": EXACT_STEPS,
        "runs": [],
    }
    todo = [(method, dtype) for dtype in DTYPES for method in CONTENDERS]
    for method, dtype in in_turn(todo, ", ".join):
        given = (Contender(method, arguments.rank), dtype, steps)
        figures = ranks.call(descend, 2, *given, what=method, seconds=LIMIT_SECONDS)[0]
        record["runs"].append({"method": method, "dtype": dtype, **figures})
    return record


class Linear(nn.Module):
    """A module whose gradient is the argument of its forward pass."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def residuals(trainee: Trainee) -> list[float]:
    """The norms of this process's residuals. Empty if there are none, or none yet."""
    if trainee.hook_state is not None:
        return [float(error.float().norm()) for error in trainee.hook_state.error_dict.values()]
    compression = trainee.compression
    return [*compression.stats()["residual_norms"].values()] if compression else []


def descend(
    rank: ranks.Rank, contender: Contender, dtype: str, steps: int
) -> dict[str, float | None]:
    """Runs SGD on this rank. Returns its largest residual / gradient, and the final distance."""
    common = torch.Generator().manual_seed(0)
    optimum = torch.randn(SHAPE, generator=common)
    center = optimum + APART * torch.randn(SHAPE, generator=common) * (1 - 2 * rank.number)
    own = torch.Generator().manual_seed(1 + rank.number)
    x = torch.zeros(SHAPE)
    ratios: list[float] = []
    distances: list[float] = []
    with group(rank, contender, "cpu", 0):
        model = Linear(getattr(torch, dtype))
        trainee, weight = contender.make(model, 0), model.weight
        for step in range(1, steps + 1):
            gradient = (x - center + NOISE * torch.randn(SHAPE, generator=own)).to(weight.dtype)
            weight.grad = None
            trainee.module(gradient).backward()
            assert weight.grad is not None
            x -= LEARNING_RATE * weight.grad.float()
            if step % SAMPLE_EVERY == 0:
                ratios += [norm / float(gradient.float().norm()) for norm in residuals(trainee)]
                distances.append(float((x - optimum).norm()))
    largest = round(max(ratios), 4) if ratios else None
    return {"largest_ratio": largest, "last_distance": round(statistics.mean(distances[-LAST:]), 4)}
