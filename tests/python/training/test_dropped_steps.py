# SPDX-License-Identifier: BSD-3-Clause
"""A loop may apply the gradients of a step, deliver them later, or discard them.

The identity then has the outputs that were applied, and the gradients of all steps but the
discarded ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.ddp import make_compressed, outputs_of, step, train
from support.ledger import TOLERANCE, Ledger
from support.on_ranks import on_ranks
from support.states import own_part
from support.synthetic import gradients, mean_gradients
from support.tensors import Tensors, same

SHAPES = {"first": (30, 40), "second": (35, 25)}
OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=0, matrix_approximation_rank=2, allow_discard=True
)
SPIKE = 1e4
CHOICES = ["discard", "apply", "later", "discard", "discard", "apply", "later", "apply"] * 2

# Runs the backward passes of a step with these gradients, and returns their outputs.
Backward = Callable[[DistributedDataParallel, Tensors], Tensors]


def _once(ddp: DistributedDataParallel, mine: Tensors) -> Tensors:
    ddp(mine).backward()
    return outputs_of(ddp)


def _accumulated(ddp: DistributedDataParallel, mine: Tensors) -> Tensors:
    part = {name: tensor / 2 for name, tensor in mine.items()}
    with ddp.no_sync():
        ddp(part).backward()
    return _once(ddp, part)


def _clipped(ddp: DistributedDataParallel, mine: Tensors) -> Tensors:
    outputs = _once(ddp, mine)
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    assert norm > 0.01, "there is something to clip"
    return outputs


# The backward passes of a loop, and the options that differ.
LOOPS: dict[str, tuple[Backward, dict[str, Any]]] = {
    "plain": (_once, {}),
    "accumulated": (_accumulated, {}),
    "clipped": (_clipped, {}),
    "int8_wire": (_once, {"wire_dtype": "int8"}),
    "no_warm_start": (_once, {"warm_start": False}),
    "bfloat16_residual": (_once, {"residual_dtype": "bfloat16"}),
}


def _tensors(compression: tp.Compression) -> list[torch.Tensor]:
    parameters = own_part(compression.state_dict(per_rank=True))["parameters"]
    fields = ("memory", "p_hat", "q_local", "q_warm")
    return [entry[field] for entry in parameters.values() for field in fields]


@contextmanager
def _changes_nothing(compression: tp.Compression) -> Iterator[None]:
    before = _tensors(compression)
    yield
    assert same(_tensors(compression), before)


@pytest.mark.parametrize(
    ("name", "by_python"), [*((name, False) for name in LOOPS), ("plain", True)]
)
@on_ranks(2)
def test_what_is_discarded_leaves_nothing_and_what_is_late_is_not_lost(
    rank: int, name: str, by_python: bool
) -> None:
    backward, fields = LOOPS[name]
    options = dataclasses.replace(OPTIONS, **fields)
    ddp, compression = make_compressed(SHAPES, options, by_python=by_python, bucket_cap_mb=1e-3)
    ledger = Ledger()
    for i, choice in enumerate(CHOICES):
        mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
        ddp.zero_grad()
        if choice == "discard":
            with _changes_nothing(compression):
                scale = SPIKE if rank == 1 else 1
                backward(ddp, {n: tensor * scale for n, tensor in mine.items()})
                compression.discard_step()
                compression.discard_step()  # a second call changes nothing
                compression.step_skipped()  # nor is there a step to deliver later
            continue
        outputs = backward(ddp, mine)
        if choice == "later":
            compression.step_skipped()
            compression.step_skipped()  # a second call changes nothing
        ledger.add(outputs if choice == "apply" else {}, means)
    # Each of some ten steps rounds M to 8 bits.
    rounded = name == "bfloat16_residual"
    ledger.check(compression, 10 * 2**-8 if rounded else TOLERANCE[torch.float32])


@on_ranks(2)
def test_discard_where_there_is_nothing_to_discard(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, dataclasses.replace(OPTIONS, start_powerSGD_iter=2))
    compression.discard_step()
    for i in range(2):  # sent exactly
        with _changes_nothing(compression):
            train(ddp, [i])
            compression.discard_step()
    train(ddp, range(2, 4))
    # A state that was loaded belongs to no step, whatever its number.
    for per_rank in (False, True):
        saved = compression.state_dict(per_rank)
        train(ddp, [4])
        compression.load_state_dict(saved)
        with _changes_nothing(compression):
            compression.discard_step()
            compression.step_skipped()

    ddp, refusing = make_compressed(SHAPES, dataclasses.replace(OPTIONS, allow_discard=False))
    train(ddp, [0])
    with (
        _changes_nothing(refusing),
        pytest.raises(ValueError, match=r"Options\(allow_discard=True\)"),
    ):
        refusing.discard_step()


@on_ranks(2)
def test_step_skipped_after_an_exact_step(rank: int) -> None:
    """A parameter that was not compressed in the dropped step keeps nothing of an earlier one."""
    ddp, compression = make_compressed(SHAPES, OPTIONS, bucket_cap_mb=1e-4)
    ledger = Ledger()
    for i in range(4):
        exact = i == 2  # sent exactly and dropped: gone, as it is without compression
        with tp.scope("never") if exact else nullcontext():
            train(ddp, [i], None if exact else ledger)
        if exact:
            compression.step_skipped()
    ledger.check(compression)


@on_ranks(2)
def test_half_precision_outputs_that_overflow_are_not_lost(rank: int) -> None:
    """Half-precision gradients whose average, with the residual, is beyond 65504.

    Two orthogonal patterns are about equal in size at rank 1: each step sends the one with more
    residual. The gradient is at most 1.99 * 32866 = 65403. The third step outputs 2 * 32866.
    """
    shapes = {"first": (32, 32)}
    rows = torch.tensor([1.0, -1.0]).repeat(16)
    columns = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(8)
    both = torch.outer(torch.ones(32), columns) + torch.outer(rows, torch.ones(32)) * 0.99
    options = dataclasses.replace(OPTIONS, matrix_approximation_rank=1)
    ddp, compression = make_compressed(shapes, options, torch.float16)
    scale, ledger, dropped = 2.0**15, Ledger(), 0
    for _ in range(8):
        compression.grad_scale = scale
        mine = (both * 1.003).half()
        output = step(ddp, {"first": mine * scale})["first"].double() / scale
        if output.isfinite().all():
            ledger.add({"first": output}, {"first": mine})
        else:
            ledger.add({}, {"first": mine})
            dropped += 1
            compression.step_skipped()
            scale /= 2
    assert dropped, "nothing has overflowed"
    assert scale >= 2.0**12
    # Outputs are rounded to half precision, 2^-11 of each. The residual does not have that
    # rounding.
    ledger.check(compression, 2**-11)
