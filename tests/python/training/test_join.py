# SPDX-License-Identifier: BSD-3-Clause
"""DDP's join(): ranks that run out of inputs send zeros and their residuals."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import torch_powersgd as tp
from support.backward import SETTLE_PASSES, in_backward
from support.ddp import make_attached, make_compressed, make_ddp, outputs_of, step, train
from support.groups import gloo
from support.ledger import TOLERANCE, Ledger, residuals_of
from support.log_records import LogRecords
from support.on_ranks import all_agree, on_ranks
from support.synthetic import COMPRESSED, SHAPES, gradients, mean_gradients
from support.tensors import Tensors, digest, same, sum_of

# Compression starts while a rank has joined.
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2)
# One rank has a single input, so that it has joined before DDP rebuilds its buckets.
INPUTS = (6, 1, 4)
WORLD_SIZE = len(INPUTS)
USED_IN_ORDER = {name: SHAPES[name] for name in ("bias", "wide", "small", "conv", "tall")}


def _joined_sum(i: int, inputs: tuple[int, ...] = INPUTS) -> Tensors:
    """The sum of the gradients of the ranks that still have inputs."""
    by_rank = [gradients(SHAPES, rank, i) for rank, count in enumerate(inputs) if i < count]
    return {name: sum_of(mine[name].double() for mine in by_rank) for name in SHAPES}


def _divisor(static: bool, i: int) -> int:
    return WORLD_SIZE if static else sum(count > i for count in INPUTS)


def _times(factor: float, tensors: Tensors) -> Tensors:
    return {name: factor * tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("static", "ddp_arguments"),
    [
        (True, {}),
        (False, {}),
        (True, {"find_unused_parameters": True, "bucket_cap_mb": 1e-3}),
        (False, {"static_graph": True}),
    ],
    ids=str,
)
@on_ranks(WORLD_SIZE)
def test_nothing_is_lost_when_ranks_run_out_of_inputs(
    rank: int, static: bool, ddp_arguments: dict[str, Any]
) -> None:
    ddp, compression = make_compressed(SHAPES, OPTIONS, **ddp_arguments)
    ledger = Ledger()
    with ddp.join(divide_by_initial_world_size=static):
        for i in range(INPUTS[rank]):
            outputs = step(ddp, gradients(USED_IN_ORDER, rank, i))
            # The ledger has the units of the sum, because the divisor changes from step to step.
            ledger.add(_times(_divisor(static, i), outputs), _joined_sum(i))
    residuals = residuals_of(compression)
    if INPUTS[rank] == max(INPUTS):  # it has every output
        errors = ledger.errors(_times(WORLD_SIZE, residuals))
        assert max(errors.values()) < TOLERANCE[torch.float32], errors
        assert min(ledger.errors()[name] for name in COMPRESSED) > 0.1
    # All ranks train on together: their states are still the same.
    later = Ledger()
    replica = [digest(outputs.values()) for outputs in train(ddp, range(10, 14), later)]
    left = residuals_of(compression)
    errors = later.errors({name: left[name] - residuals[name] for name in left})
    assert max(errors.values()) < TOLERANCE[torch.float32], errors
    assert all_agree(replica)
    # A joined rank counts steps like the others.
    assert compression.stats()["steps"] == max(INPUTS) + 4


@on_ranks(2)
def test_the_residual_of_a_joined_rank_is_sent(rank: int) -> None:
    """Each rank has one gradient. Then rank 0 alone still has some, which are almost zero."""
    ddp = make_attached(SHAPES, replace(OPTIONS, start_powerSGD_iter=0))
    ledger = Ledger()
    with ddp.join():
        # Rank 2 takes 2 of 16 rows' dimensions out of the mean residual at each step.
        for i in range(40 if rank == 0 else 1):
            mine = _times(1e-20 if i else 1, gradients(SHAPES, rank, i))
            ledger.add(step(ddp, mine), {} if i else mean_gradients(SHAPES, 2, 0))
    if rank == 0:
        assert max(ledger.errors().values()) < TOLERANCE[torch.float32], ledger.errors()


@pytest.mark.parametrize("static", [True, False], ids=["world-size", "remaining-ranks"])
@on_ranks(WORLD_SIZE)
def test_warm_up_is_exact(rank: int, static: bool) -> None:
    plain = make_ddp(SHAPES, process_group=gloo())
    attached = make_attached(SHAPES, replace(OPTIONS, start_powerSGD_iter=100))
    found: list[list[Tensors]] = [[], []]
    for ddp, outputs in zip((plain, attached), found, strict=True):
        with ddp.join(divide_by_initial_world_size=static):
            for i in range(INPUTS[rank]):
                outputs.append(step(ddp, gradients(USED_IN_ORDER, rank, i)))
    for i, (expected, outputs) in enumerate(zip(*found, strict=True)):
        assert same(expected.values(), outputs.values()), i
        # With the other divisor the values would differ.
        for name, total in _joined_sum(i).items():
            assert (outputs[name] - total / _divisor(static, i)).abs().max() < 1e-6


EVEN_INPUTS = (6, 2, 4)


@on_ranks(WORLD_SIZE)
def test_two_models_and_accumulation(rank: int) -> None:
    """Trains two models in one join context. Every other micro-batch is not synchronized."""
    pairs = [make_compressed(SHAPES, OPTIONS) for _ in range(2)]
    ledgers = Ledger(), Ledger()
    with Join([ddp for ddp, _ in pairs]):
        for i in range(EVEN_INPUTS[rank]):
            for (ddp, _), ledger in zip(pairs, ledgers, strict=True):
                if i % 2 == 0:
                    ddp.zero_grad()
                with ddp.no_sync() if i % 2 == 0 else nullcontext():
                    ddp(gradients(SHAPES, rank, i)).backward()
                if i % 2:
                    sums = [_joined_sum(k, EVEN_INPUTS) for k in (i - 1, i)]
                    total = {name: sums[0][name] + sums[1][name] for name in SHAPES}
                    ledger.add(outputs_of(ddp), _times(1 / WORLD_SIZE, total))
    for (_, compression), ledger in zip(pairs, ledgers, strict=True):
        errors = ledger.errors(residuals_of(compression))
        assert max(errors.values()) < TOLERANCE[torch.float32] or rank > 0, errors
    assert tp.stats()["steps"] == 2 * 3


@on_ranks(2)
def test_training_goes_on_after_an_early_termination(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    ledger = Ledger()
    with pytest.raises(RuntimeError, match="exhausted"), ddp.join(throw_on_early_termination=True):
        train(ddp, range(3 + rank), ledger)
    train(ddp, range(10, 14), ledger)
    ledger.check(compression)
    assert compression.stats()["steps"] == 3 + 4


@on_ranks(2, options=replace(OPTIONS, start_powerSGD_iter=0, min_numel=4000))
def test_a_rank_that_leaves_an_unattached_module_alone_says_so(rank: int) -> None:
    # Without a hook DDP sends a joined rank's zeros outside of backward, where nothing is
    # compressed. The others wait for its factors. A warning is all that can be done.
    warnings = LogRecords(logging.WARNING).seen
    tensor = torch.ones(5000)
    for _ in range(SETTLE_PASSES + 1):
        in_backward(lambda: dist.all_reduce(tensor.clone()))
    warnings.clear()
    for numel, asynchronous in ((5000, False), (6000, True)):  # DDP would send neither
        work = dist.all_reduce(torch.ones(numel), async_op=asynchronous)
        if work:
            work.wait()
    assert not warnings
    for _ in range(2):
        zeros = torch.full_like(tensor, rank)
        dist.all_reduce(zeros, async_op=True).wait()
        assert (zeros == 1).all()
    [(level, message)] = warnings
    assert level == "WARNING"
    for part in ("5000", "join()", "attach", 'scope("never")'):
        assert part in message


@on_ranks(WORLD_SIZE, options=replace(OPTIONS, start_powerSGD_iter=0, min_numel=500))
def test_an_unattached_module_without_compression_joins(rank: int) -> None:
    ddp = make_ddp(SHAPES)
    with tp.scope("never"), ddp.join():
        for i in range(INPUTS[rank]):
            ledger = Ledger()
            ledger.add(step(ddp, gradients(SHAPES, rank, i)), _times(1 / 3, _joined_sum(i)))
            assert max(ledger.errors().values()) < 1e-6  # a sum of three in float32
    assert tp.stats()["compressed_calls"] == 0
