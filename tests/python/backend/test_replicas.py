# SPDX-License-Identifier: BSD-3-Clause
"""All ranks have the same outputs, bit for bit, with any thread counts, and in every run."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.backward import SETTLE_PASSES, reduce_in_backward
from support.ddp import make_attached, make_compressed, make_ddp, step
from support.on_ranks import on_ranks
from support.stages import run_stages
from support.synthetic import gradients
from support.tensors import Shapes, Tensors, digest
from torch_powersgd._core import _C
from torch_powersgd.options import to_core

# "wide" and "tall" are cut into several tiles, so that two threads do share the work.
SHAPES = {"wide": (40, 700), "tall": (900, 30), "conv": (16, 3, 5, 5), "bias": (37,)}
STEPS = 300
# One rank runs on one thread and one on two, then the other way round.
THREADS = [(1, 2), (2, 1)]


def _inputs(rank: int, shapes: Shapes, period: int) -> list[Tensors]:
    """A few gradients to use again and again: making new ones takes longer than the steps."""
    return [gradients(shapes, rank, i) for i in range(period)]


def _attached(rank: int, threads: tuple[int, int], options: tp.Options) -> tuple[list[str], str]:
    torch.set_num_threads(threads[rank])
    ddp, compression = make_compressed(SHAPES, options)
    inputs = _inputs(rank, SHAPES, 7)
    digests = [digest(step(ddp, inputs[i % 7]).values()) for i in range(STEPS)]
    state = compression.state_dict()["parameters"].values()
    assert torch.get_num_threads() == threads[rank]
    return digests, digest([saved[key] for saved in state for key in ("residual", "q")])


def test_attached_replicas_stay_equal_for_hundreds_of_steps() -> None:
    options = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=4)
    runs = [result for threads in THREADS for result in ranks.run(2, _attached, threads, options)]
    assert len(set(runs[0][0])) == STEPS  # the outputs do change
    assert runs == runs[:1] * len(runs)


def _short(rank: int, kind: str, options: tp.Options, steps: int) -> str:
    """Runs the other settings in a training loop, in which a difference would grow."""
    torch.set_num_threads(1 + rank % 2)
    shapes: Shapes = {"flat": (5000,)} if kind == "flat" else SHAPES
    ddp = make_ddp(shapes) if kind == "unattached" else None
    if kind == "attached":
        ddp = make_attached(shapes, options)
    inputs = _inputs(rank, shapes, 5)
    weights = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for i in range(steps):
        mine = {name: inputs[i % 5][name] + 0.1 * weights[name] for name in shapes}
        if ddp is None:
            outputs = dict(zip(mine, reduce_in_backward(mine.values()), strict=True))
        else:
            outputs = step(ddp, mine)
        for name in shapes:
            weights[name] -= 0.01 * outputs[name]
    assert tp.stats()["compressed_calls"] >= steps - SETTLE_PASSES
    return digest(weights.values())


@pytest.mark.parametrize(
    ("world_size", "kind", "fields"),
    [
        (4, "attached", {}),
        (2, "attached", {"warm_start": False}),
        (2, "attached", {"use_error_feedback": False}),
        (2, "attached", {"residual_dtype": torch.bfloat16}),
        (2, "flat", {}),
        (2, "unattached", {}),
    ],
    ids=["four-ranks", "cold-start", "no-feedback", "bfloat16-residual", "flat", "unattached"],
)
def test_replicas_stay_equal_in_training(
    world_size: int, kind: str, fields: dict[str, Any]
) -> None:
    options = tp.Options.hook_defaults(
        start_powerSGD_iter=0, matrix_approximation_rank=3, min_numel=1000, **fields
    )
    steps = 200 if world_size == 2 else 50  # more ranks than cores are slow
    assert len(set(ranks.run(world_size, _short, kind, options, steps, options=options))) == 1


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@on_ranks(1, backend=None)
def test_the_stages_run_on_as_many_threads_as_torch_has(rank: int) -> None:
    options = to_core(tp.Options.hook_defaults(matrix_approximation_rank=2))
    compressor = _C.BucketCompressor([[2000, 1000]], options, torch.float32)
    gradient = torch.ones(2000 * 1000)
    run_stages(compressor, gradient, 0)  # allocates
    before = _threads()
    run_stages(compressor, gradient, 1)
    assert _threads() == before, "torch has one thread"
    torch.set_num_threads(4)
    run_stages(compressor, gradient, 2)
    assert _threads() == before + 3
