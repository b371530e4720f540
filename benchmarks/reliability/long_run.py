# SPDX-License-Identifier: BSD-3-Clause
"""A long training with a new module and new options every few hundred steps.

It makes every call that a training loop makes. The gradients are known, so the outputs, the
residual and the mean gradients must add up.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import math
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bits import digest
from launcher.ranks import Rank
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from reliability.resources import Sample, sample, summary

WORLD = 2
TURN = 500  # steps
SAMPLE_EVERY = 100
EXACT_FIRST = 50  # steps before compression, in the turn "exact steps first"
# Two matrices and a convolution, which are compressed; a bias and a small matrix, which are not.
SHAPES = {"conv": (32, 8, 3, 3), "wide": (48, 96), "tall": (120, 40), "bias": (33,), "s": (4, 5)}
POOL = 61  # gradients per rank, used in rotation; shares no divisor with other periods here

# The options of the turns. The matrix rank is 2 unless they name another.
TURNS: dict[str, dict[str, Any]] = {
    "float32 factors": {},
    "bfloat16 factors": {"wire_dtype": "bfloat16"},
    "int8 factors, rank 4": {"wire_dtype": "int8", "matrix_approximation_rank": 4},
    "int4 factors": {"wire_dtype": "int4"},
    "bfloat16 residual": {"residual_dtype": "bfloat16", "wire_dtype": "int8"},
    "no warm start": {"warm_start": False},
    "exact steps first": {"start_powerSGD_iter": EXACT_FIRST},
    "a check every 20 steps": {"check_every": 20, "wire_dtype": "bfloat16"},
    "only what gains 10 times": {"min_compression_rate": 10},
    "rank 1, epsilon, frequent log": {
        "matrix_approximation_rank": 1,
        "orthogonalization_epsilon": 1e-6,
        "compression_stats_logging_frequency": 100,
    },
}
CYCLE = TURN * len(TURNS)  # the steps in which every turn comes once

Tensors = dict[str, Tensor]


class Known(nn.Module):
    """A module whose gradients are the arguments of its forward pass."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: nn.Parameter(v) for name, v in values.items()})

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        terms = [(self.weights[name] * g).sum().double() for name, g in gradients.items()]
        return torch.stack(terms).sum()


class Turn:
    """The steps of one module with one set of options.

    Args:
        number: the number of earlier turns.
        length: the number of steps of a turn.
        values: the values of the parameters.
        state: the compression state to continue from.
        compressed: whether the module is attached; otherwise everything runs over plain Gloo.
    """

    def __init__(
        self,
        number: int,
        length: int,
        values: Tensors,
        state: dict[str, Any] | None,
        compressed: bool,
    ) -> None:
        self.title, fields = list(TURNS.items())[number % len(TURNS)]
        self.first, self.length = number * length, length
        self.ddp = DistributedDataParallel(Known(values), bucket_cap_mb=0.02)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3, momentum=0.9)
        self.scale = 1.0
        self.compression: tp.Compression | None = None
        if compressed:
            exact = fields.get("start_powerSGD_iter", 0)
            start = exact + (state["step"] if state else 0)
            rank = {"matrix_approximation_rank": 2}
            options = tp.Options.hook_defaults(**{**rank, **fields, "start_powerSGD_iter": start})
            self.compression = tp.attach(self.ddp, options)
            if state is not None:
                self.compression.load_state_dict(state)

    def step(self, i: int, mine: Tensors) -> Tensors:
        """Takes a step, with all calls of a training loop. Returns the averaged gradients."""
        within = i - self.first
        exact: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.compression is not None:
            self._between(within, self.compression)
            if within % 100 in (60, 61, 62):
                exact = self.compression.paused()
            elif within % 37 == 5:
                exact = tp.scope("never")
        self.optimizer.zero_grad()
        scaled = {name: gradient * self.scale for name, gradient in mine.items()}
        with exact:
            self.ddp(scaled).backward()
        outputs = {}
        for name, weight in self.ddp.module.weights.items():
            weight.grad /= self.scale  # a power of two, so that this is exact
            outputs[name] = weight.grad
        self.optimizer.step()
        return outputs

    def _between(self, within: int, compression: tp.Compression) -> None:
        if within % 40 == 7:
            self.scale = compression.grad_scale = 2.0 ** (within % 5)
        if within % 90 == 80:
            compression.stats(per_layer=True, flat=True)
        if within % 200 == 150:
            compression.load_state_dict(compression.state_dict(per_rank=True))
        if within % 200 == 190:
            compression.load_state_dict(compression.state_dict())
        if within == self.length - 10:
            compression.reset_stats()

    def values(self) -> Tensors:
        return {name: w.detach().clone() for name, w in self.ddp.module.weights.items()}


def train(
    rank: Rank, steps: int, compressed: bool, warm_up: int, length: int = TURN
) -> dict[str, Any]:
    """Trains on one rank, in turns. Returns its resources, a hash and the errors of the sums."""
    _join(rank, rank.folder / "store", compressed)
    pools = [_pool(other) for other in range(WORLD)]
    means = _means(pools)
    values = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state: dict[str, Any] | None = None
    samples: list[Sample] = []
    parameters = hashlib.sha256()  # of the parameters after each turn
    turns: dict[str, list[float]] = {}  # the errors of the turns by their titles
    whole = _zeros()  # the sum of all outputs less all mean gradients
    scale_of_sums = _zeros()  # the sum of all mean gradients
    for number in range(math.ceil(steps / length)):
        turn = Turn(number, length, values, state, compressed)
        lost, total = _zeros(), _zeros()
        for i in range(turn.first, min(steps, turn.first + length)):
            outputs = turn.step(i, pools[rank.number][i % POOL])
            for name, mean in means[i % POOL].items():
                lost[name] += outputs[name].double() - mean
                total[name] += mean
            if (i + 1) % SAMPLE_EVERY == 0:
                samples.append(sample(i + 1))
        before = _residuals(state)
        if turn.compression is not None:
            turn.compression.grad_scale = 1.0
            state = turn.compression.state_dict()
        added = {name: residual - before[name] for name, residual in _residuals(state).items()}
        turns.setdefault(turn.title, []).append(_error(lost, added, total))
        for name in SHAPES:
            whole[name] += lost[name]
            scale_of_sums[name] += total[name]
        values = turn.values()
        parameters.update(digest(values[name] for name in sorted(values)).encode())
    dist.barrier()  # or one rank counts its files while the other closes its sockets
    dist.destroy_process_group()
    return {
        **summary(samples, warm_up),
        "parameters": parameters.hexdigest()[:16],
        "turns": {title: [len(each), max(each)] for title, each in turns.items()},
        "error": _error(whole, _residuals(state), scale_of_sums),
    }


def groups(rank: Rank, count: int, compressed: bool, warm_up: int) -> dict[str, Any]:
    """Makes and destroys groups on one rank, each with a module that trains for a few steps."""
    samples = []
    pool = _pool(rank.number)
    for number in range(count):
        _join(rank, rank.folder / f"store{number}", compressed)
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        turn = Turn(0, TURN, zeros, None, False)
        if compressed:
            options = tp.Options.hook_defaults(start_powerSGD_iter=1, wire_dtype="int8")
            tp.attach(turn.ddp, options)
        for i in range(3):
            turn.step(i, pool[i])
        del turn
        dist.barrier()  # or one rank closes its sockets while the other still reads
        dist.destroy_process_group()
        samples.append(sample(number + 1))
    return summary(samples, warm_up)


def _join(rank: Rank, file: Path, compressed: bool) -> None:
    gc.freeze()  # spares garbage collections the many objects of torch's modules
    # Not rank.group, which keeps a group until the process exits.
    dist.init_process_group(
        "cpu:powersgd" if compressed else "gloo",
        store=dist.FileStore(str(file), WORLD),
        rank=rank.number,
        world_size=WORLD,
        timeout=timedelta(seconds=300),
    )


def _pool(rank: int) -> list[Tensors]:
    """The gradients of a rank: a constant part plus noise."""
    chance = torch.Generator().manual_seed(100 + rank)
    steady = {name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()}
    return [
        {
            name: steady[name] + torch.randn(shape, generator=chance)
            for name, shape in SHAPES.items()
        }
        for _ in range(POOL)
    ]


def _means(pools: list[list[Tensors]]) -> list[Tensors]:
    return [
        {name: torch.stack([each[name].double() for each in sets]).mean(0) for name in SHAPES}
        for sets in zip(*pools, strict=True)
    ]


def _zeros() -> Tensors:
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def _residuals(state: dict[str, Any] | None) -> Tensors:
    """The mean residuals of a state, with zeros where it has none."""
    saved = state["parameters"] if state else {}
    found = _zeros()
    for name in SHAPES:
        if f"weights.{name}" in saved:
            found[name] += saved[f"weights.{name}"]["residual"].double()
    return found


def _error(lost: Tensors, residual: Tensors, total: Tensors) -> float:
    """The largest relative error of: outputs + residual = mean gradients."""
    return max(float((lost[n] + residual[n]).norm() / total[n].norm()) for n in SHAPES)
