# SPDX-License-Identifier: BSD-3-Clause
"""A loop may apply the gradients of a step, deliver them later, or discard them.

The identity of test_identity then has the outputs that were applied, and the gradients of all steps
but the discarded ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    Ledger,
    Tensors,
    gradients,
    make_compressed,
    make_ddp,
    mean_gradients,
    outputs_of,
    own_part,
    residuals_of,
)

SHAPES = {"first": (30, 40), "second": (35, 25)}
OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=0, matrix_approximation_rank=2, allow_discard=True
)
TOLERANCE = 1e-5  # float32, as in test_identity
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


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        backward: Its backward passes.
        by_python: Whether the hook is the one in Python.
        fields: Options that differ.
    """

    backward: Backward = _once
    by_python: bool = False
    fields: tuple[tuple[str, Any], ...] = ()

    def attach(self) -> tuple[DistributedDataParallel, tp.Compression]:
        ddp = make_ddp(SHAPES, bucket_cap_mb=1e-3)
        options = dataclasses.replace(OPTIONS, **dict(self.fields))
        compression = tp.attach(ddp, options, register_hook=not self.by_python)
        if self.by_python:
            ddp.register_comm_hook(None, compression.comm_hook)
        return ddp, compression


LOOPS = {
    "plain": Loop(),
    "accumulated": Loop(_accumulated),
    "clipped": Loop(_clipped),
    "python_hook": Loop(by_python=True),
    "int8_wire": Loop(fields=(("wire_dtype", "int8"),)),
    "no_warm_start": Loop(fields=(("warm_start", False),)),
    "float16_residual": Loop(fields=(("residual_dtype", "float16"),)),
}


def _tensors(compression: tp.Compression) -> list[torch.Tensor]:
    parameters = own_part(compression.state_dict(per_rank=True))["parameters"]
    fields = ("memory", "p_hat", "q_local", "q_warm")
    return [entry[field] for entry in parameters.values() for field in fields]


@contextmanager
def _changes_nothing(compression: tp.Compression) -> Iterator[None]:
    before = _tensors(compression)
    yield
    for mine, other in zip(_tensors(compression), before, strict=True):
        assert torch.equal(mine, other)


def _train(rank: int, name: str) -> dict[str, float]:
    loop = LOOPS[name]
    ddp, compression = loop.attach()
    ledger = Ledger()
    for i, choice in enumerate(CHOICES):
        mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
        ddp.zero_grad()
        if choice == "discard":
            with _changes_nothing(compression):
                scale = SPIKE if rank == 1 else 1
                loop.backward(ddp, {n: tensor * scale for n, tensor in mine.items()})
                compression.discard_step()
                compression.discard_step()  # a second call changes nothing
                compression.step_skipped()  # nor is there a step to deliver later
            continue
        outputs = loop.backward(ddp, mine)
        if choice == "later":
            compression.step_skipped()
        ledger.add(outputs if choice == "apply" else {}, means)
    return ledger.errors(residuals_of(compression))


def _train_all(rank: int) -> dict[str, dict[str, float]]:
    return {name: _train(rank, name) for name in LOOPS}


def test_what_is_discarded_leaves_nothing_and_what_is_late_is_not_lost() -> None:
    for by_loop in ranks.run(2, _train_all):
        for name, errors in by_loop.items():
            # Each of some ten steps rounds M to 11 bits.
            bound = 10 * 2**-11 if name == "float16_residual" else TOLERANCE
            assert max(errors.values()) < bound, name


def _with_scaler(rank: int) -> dict[str, float]:
    """Discards a spike that is finite, while the scaler skips an overflow by itself."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    ddp, compression = make_compressed(SHAPES, OPTIONS, scaler=scaler, bucket_cap_mb=1e-3)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    ledger = Ledger()
    for i in range(12):
        mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
        spike, overflow = i in (3, 4, 8), i == 6
        if spike and rank == 1:
            mine = {name: tensor * SPIKE for name, tensor in mine.items()}
        if overflow:
            del means["first"]  # the gradient that is not finite is lost
            mine["first"][3, 5] = float("inf")
        optimizer.zero_grad()
        scaler.scale(ddp(mine)).backward()
        scaler.unscale_(optimizer)
        applied = {} if overflow else outputs_of(ddp)
        if spike:
            compression.discard_step()
        else:
            ledger.add(applied, means)
            scaler.step(optimizer)
        scaler.update()
    state = compression.state_dict()
    residuals = residuals_of(compression)
    return ledger.errors({name: r / state["grad_scale"] for name, r in residuals.items()})


def test_a_finite_spike_is_discarded_under_a_scaler() -> None:
    for errors in ranks.run(2, _with_scaler):
        assert max(errors.values()) < TOLERANCE, errors


def _outside_of_steps(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, dataclasses.replace(OPTIONS, start_powerSGD_iter=2))
    compression.discard_step()
    for i in range(2):  # sent exactly
        with _changes_nothing(compression):
            ddp(gradients(SHAPES, rank, i)).backward()
            compression.discard_step()
    for i in range(2, 4):
        ddp(gradients(SHAPES, rank, i)).backward()
    # A state that was loaded belongs to no step, whatever its number.
    for per_rank in (False, True):
        saved = compression.state_dict(per_rank)
        ddp(gradients(SHAPES, rank, 4)).backward()
        compression.load_state_dict(saved)
        with _changes_nothing(compression):
            compression.discard_step()
            compression.step_skipped()

    ddp, refusing = make_compressed(SHAPES, dataclasses.replace(OPTIONS, allow_discard=False))
    ddp(gradients(SHAPES, rank, 0)).backward()
    with (
        _changes_nothing(refusing),
        pytest.raises(ValueError, match=r"Options\(allow_discard=True\)"),
    ):
        refusing.discard_step()


def test_discard_where_there_is_nothing_to_discard() -> None:
    ranks.run(2, _outside_of_steps)
