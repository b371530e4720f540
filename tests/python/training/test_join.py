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
from support import ranks
from support.call_observer import SETTLE_PASSES, in_backward
from support.call_observer import gloo as gloo_group
from support.log_records import LogRecords
from support.paired_training import digest, same
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Arrays,
    Ledger,
    Tensors,
    gradients,
    make_attached,
    make_compressed,
    make_ddp,
    mean_gradients,
    outputs_of,
    residuals_of,
    step,
    to_numpy,
)

# Compression starts while a rank has joined.
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2, matrix_approximation_rank=2)
TOLERANCE = 1e-5  # the identity in float32, as in test_identity
# One rank has a single input, so that it has joined before DDP rebuilds its buckets.
INPUTS = (6, 1, 4)
WORLD_SIZE = len(INPUTS)
USED_IN_ORDER = {name: SHAPES[name] for name in ("bias", "wide", "small", "conv", "tall")}


def _active(i: int) -> int:
    return sum(count > i for count in INPUTS)


def _joined_means(i: int, divisor: int, inputs: tuple[int, int, int] = INPUTS) -> Tensors:
    """The sum of the gradients of the ranks that still have inputs, divided."""
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for rank, count in enumerate(inputs):
        if i < count:
            for name, mine in gradients(SHAPES, rank, i).items():
                total[name] += mine.double() / divisor
    return total


# The identity's errors while ranks run out of inputs, the same without the residual, the errors of
# later steps, their digests, and the count of steps.
Uneven = tuple[dict[str, float], dict[str, float], dict[str, float], list[str], int]


def _uneven(rank: int, static: bool, ddp_arguments: dict[str, Any]) -> Uneven:
    ddp, compression = make_compressed(SHAPES, OPTIONS, **ddp_arguments)
    ledger = Ledger()
    with ddp.join(divide_by_initial_world_size=static):
        for i in range(INPUTS[rank]):
            outputs = step(ddp, gradients(USED_IN_ORDER, rank, i))
            # The ledger has the units of the sum, because the divisor changes from step to step.
            scale = WORLD_SIZE if static else _active(i)
            ledger.add({name: scale * g for name, g in outputs.items()}, _joined_means(i, 1))
    residuals = residuals_of(compression)
    joined = ledger.errors({name: WORLD_SIZE * r for name, r in residuals.items()})
    without = ledger.errors()
    # All ranks train on together: their states are still the same.
    later = Ledger()
    replica = []
    for i in range(10, 14):
        outputs = step(ddp, gradients(SHAPES, rank, i))
        later.add(outputs, mean_gradients(SHAPES, WORLD_SIZE, i))
        replica.append(digest(outputs.values()))
    left = residuals_of(compression)
    errors = later.errors({name: left[name] - residuals[name] for name in left})
    return joined, without, errors, replica, compression.stats()["steps"]


@pytest.mark.parametrize("static", [True, False], ids=["world-size", "remaining-ranks"])
@pytest.mark.parametrize(
    "ddp_arguments",
    [{}, {"find_unused_parameters": True, "bucket_cap_mb": 1e-3}, {"static_graph": True}],
    ids=["default", "unused", "static"],
)
def test_nothing_is_lost_when_ranks_run_out_of_inputs(
    static: bool, ddp_arguments: dict[str, Any]
) -> None:
    results = ranks.run(WORLD_SIZE, _uneven, static, ddp_arguments)
    # The rank with the most inputs has every output.
    joined, without, *_ = results[0]
    assert max(joined.values()) < TOLERANCE, joined
    assert min(without[name] for name in COMPRESSED) > 0.1, without
    for _, _, errors, replica, steps in results:
        assert max(errors.values()) < TOLERANCE, errors
        assert replica == results[0][3]
        assert steps == max(INPUTS) + 4  # a joined rank counts steps like the others


def _delivered(rank: int, still: int) -> dict[str, float]:
    """Each rank has one gradient. Then rank 0 alone still has inputs, whose gradients are almost
    zero.
    """
    ddp = make_attached(SHAPES, replace(OPTIONS, start_powerSGD_iter=0))
    ledger = Ledger()
    with ddp.join():
        for i in range(still if rank == 0 else 1):
            quiet = 1e-20 if i else 1
            mine = {name: quiet * g for name, g in gradients(SHAPES, rank, i).items()}
            means = mean_gradients(SHAPES, 2, 0) if i == 0 else {}
            ledger.add(step(ddp, mine), means)
    return ledger.errors()


def test_the_residual_of_a_joined_rank_is_sent() -> None:
    # Rank 2 takes 2 of 16 rows' dimensions out of the mean residual at each step.
    delivered, _ = ranks.run(2, _delivered, 40)
    assert max(delivered.values()) < TOLERANCE, delivered


def _against_gloo(
    rank: int, static: bool, ddp_arguments: dict[str, Any]
) -> tuple[list[bool], Arrays]:
    options = tp.Options.hook_defaults(start_powerSGD_iter=100)
    plain = make_ddp(SHAPES, process_group=gloo_group(), **ddp_arguments)
    attached = make_attached(SHAPES, options, **ddp_arguments)
    found = []
    for ddp in (plain, attached):
        outputs = []
        with ddp.join(divide_by_initial_world_size=static):
            for i in range(INPUTS[rank]):
                outputs.append(step(ddp, gradients(USED_IN_ORDER, rank, i)))
        found.append(outputs)
    equal = [
        same([a[name] for name in SHAPES], [b[name] for name in SHAPES])
        for a, b in zip(*found, strict=True)
    ]
    return equal, to_numpy(found[1][-1])


@pytest.mark.parametrize("static", [True, False], ids=["world-size", "remaining-ranks"])
def test_warm_up_is_exact(static: bool) -> None:
    results = ranks.run(WORLD_SIZE, _against_gloo, static, {})
    for rank, (equal, _) in enumerate(results):
        assert equal == [True] * INPUTS[rank]
    # With the other divisor the values would differ.
    last, divisor = results[0][1], WORLD_SIZE if static else 1
    for name, value in _joined_means(INPUTS[0] - 1, divisor).items():
        assert abs(last[name] - value.numpy()).max() < 1e-6


EVEN_INPUTS = (6, 2, 4)


def _two_models(rank: int) -> tuple[list[dict[str, float]], int]:
    """Trains two models in one join context. Every other micro-batch is not synchronized."""
    pairs = [make_compressed(SHAPES, OPTIONS) for _ in range(2)]
    models = [ddp for ddp, _ in pairs]
    ledgers = Ledger(), Ledger()
    with Join([*models]):
        for i in range(EVEN_INPUTS[rank]):
            for ddp, ledger in zip(models, ledgers, strict=True):
                if i % 2 == 0:
                    ddp.zero_grad()
                with ddp.no_sync() if i % 2 == 0 else nullcontext():
                    ddp(gradients(SHAPES, rank, i)).backward()
                if i % 2:
                    means = [_joined_means(k, WORLD_SIZE, EVEN_INPUTS) for k in (i - 1, i)]
                    total = {name: means[0][name] + means[1][name] for name in SHAPES}
                    ledger.add(outputs_of(ddp), total)
    errors = [o.errors(residuals_of(c)) for o, (_, c) in zip(ledgers, pairs, strict=True)]
    return errors, tp.stats()["steps"]


def test_two_models_and_accumulation() -> None:
    results = ranks.run(WORLD_SIZE, _two_models)
    for errors in results[0][0]:
        assert max(errors.values()) < TOLERANCE, errors
    assert [steps for _, steps in results] == [2 * 3] * WORLD_SIZE


def _thrown(rank: int) -> tuple[dict[str, float], int]:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    ledger = Ledger()

    def train(steps: range) -> None:
        for i in steps:
            ledger.add(step(ddp, gradients(SHAPES, rank, i)), mean_gradients(SHAPES, 2, i))

    with pytest.raises(RuntimeError, match="exhausted"), ddp.join(throw_on_early_termination=True):
        train(range(3 + rank))
    train(range(10, 14))
    return ledger.errors(residuals_of(compression)), compression.stats()["steps"]


def test_training_goes_on_after_an_early_termination() -> None:
    for errors, steps in ranks.run(2, _thrown):
        assert steps == 3 + 4
        assert max(errors.values()) < TOLERANCE, errors


def _flat(rank: int) -> list[tuple[str, str]]:
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
    return warnings


def test_a_rank_that_leaves_an_unattached_module_alone_says_so() -> None:
    # Without a hook DDP sends a joined rank's zeros outside of backward, where nothing is
    # compressed. The others wait for its factors. A warning is all that can be done.
    options = replace(OPTIONS, start_powerSGD_iter=0, min_numel=4000)
    for warnings in ranks.run(2, _flat, options=options):
        assert [level for level, _ in warnings] == ["WARNING"]
        for part in ("5000", "join()", "attach", 'scope("never")'):
            assert part in warnings[0][1]


def _unattached_uncompressed(rank: int) -> tuple[list[float], int]:
    ddp = make_ddp(SHAPES)
    errors = []
    with tp.scope("never"), ddp.join():
        for i in range(INPUTS[rank]):
            ledger = Ledger()
            ledger.add(step(ddp, gradients(SHAPES, rank, i)), _joined_means(i, WORLD_SIZE))
            errors.append(max(ledger.errors().values()))
    return errors, tp.stats()["compressed_calls"]


def test_an_unattached_module_without_compression_joins() -> None:
    options = tp.Options.hook_defaults(start_powerSGD_iter=0, min_numel=500)
    for errors, calls in ranks.run(WORLD_SIZE, _unattached_uncompressed, options=options):
        assert max(errors) < 1e-6  # a sum of three in float32
        assert calls == 0
