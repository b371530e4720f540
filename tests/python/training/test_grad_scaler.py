# SPDX-License-Identifier: BSD-3-Clause
"""Training with a GradScaler: the residual follows its scale, and a skipped step loses nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_powersgd as tp
from support.ddp import make_compressed, make_ddp, outputs_of, weights_of
from support.ledger import TOLERANCE, Ledger, residuals_of
from support.on_ranks import all_agree, on_ranks
from support.synthetic import gradients, mean_gradients
from support.tensors import relative_error
from torch_powersgd import grad_scaler

# Each has a bucket of its own. "bias" has no residual, and is lost with a step that is skipped.
SHAPES = {"first": (30, 40), "second": (35, 25), "bias": (30,)}
MATRICES = ("first", "second")
OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=0, matrix_approximation_rank=2, allow_discard=True
)
INF = float("inf")


def _worst_error(ledger: Ledger, compression: tp.Compression) -> float:
    """The largest error of the identity. Scales are powers of 2 and round nothing."""
    errors = ledger.errors(residuals_of(compression))
    return max(errors[name] for name in MATRICES)


def with_scaler(
    rank: int,
    bad: dict[int, tuple[str, int]],
    known: bool = True,
    spikes: tuple[int, ...] = (),
    device: str = "cpu",
) -> None:
    """Runs eight steps.

    Args:
        bad: the gradient that is not finite at a step, and on which rank: {step: (name, rank)}.
        known: whether the scaler is given to attach.
        spikes: the steps that are discarded, as their gradients are far too large.
    """
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
    ddp, compression = make_compressed(
        SHAPES, OPTIONS, scaler=scaler if known else None, bucket_cap_mb=1e-4, device=device
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    ledger, scales = Ledger(), []
    for i in range(8):
        mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
        if i in spikes and rank == 1:
            mine = {name: 1e4 * tensor for name, tensor in mine.items()}
        name, where = bad.get(i, ("", None))
        if name:
            lost = SHAPES if i == 0 else [name]  # DDP's first step has a single bucket
            means = {n: mean for n, mean in means.items() if n not in lost}
            if where == rank:
                mine[name].view(-1)[3] = INF
        optimizer.zero_grad()
        scaler.scale(ddp({n: tensor.to(device) for n, tensor in mine.items()})).backward()
        scaler.unscale_(optimizer)
        applied = {n: output.cpu() for n, output in outputs_of(ddp).items()}
        if i in spikes:
            compression.discard_step()
        else:
            scaler.step(optimizer)
            finite = all(output.isfinite().all() for output in applied.values())
            assert finite is (not name)
            ledger.add(applied if finite else {}, means)
        scaler.update()
        scales.append(scaler.get_scale())
    assert (_worst_error(ledger, compression) < TOLERANCE[torch.float32]) is known
    assert len(set(scales)) >= 3, "the scale has changed"
    assert all_agree(scales)


BAD: dict[str, dict[int, tuple[str, int]]] = {
    "none": {},
    "one": {3: ("first", 1)},
    "first-step": {0: ("second", 0)},
    "twice": {4: ("second", 1), 5: ("first", 0)},
    "raw": {2: ("bias", 1)},
}


@pytest.mark.parametrize("case", BAD)
@on_ranks(2)
def test_a_scaler_that_skips_loses_nothing_of_the_other_buckets(rank: int, case: str) -> None:
    with_scaler(rank, BAD[case])


@on_ranks(2)
def test_a_finite_spike_is_discarded_while_the_scaler_skips_an_overflow(rank: int) -> None:
    with_scaler(rank, BAD["twice"], spikes=(2, 6))


@on_ranks(2)
def test_without_the_scaler_the_residual_is_in_other_units(rank: int) -> None:
    """Shows that the tests above can fail: the scale grows unannounced."""
    with_scaler(rank, {}, known=False)


@on_ranks(2)
def test_a_scaler_that_skips_one_optimizer_of_two_delivers_nothing_twice(rank: int) -> None:
    """A scaler skips the step of one optimizer of two, and the outputs of the other are applied."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    ddp, compression = make_compressed(SHAPES, OPTIONS, scaler=scaler, bucket_cap_mb=1e-4)
    weights = weights_of(ddp)
    optimizers = [torch.optim.SGD([weights[name]], lr=1.0) for name in MATRICES]
    ledger = Ledger()
    for i in range(8):
        mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
        del means["bias"]  # no optimizer has it
        if i in (3, 5):
            mine["first"][3, 4] = INF
            del means["first"]
        before = {name: weights[name].detach().clone() for name in MATRICES}
        ddp.zero_grad()
        scaler.scale(ddp(mine)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        ledger.add({name: before[name] - weights[name].detach() for name in MATRICES}, means)
    # Differences of weights, which are some ten times larger than a gradient, are rounded.
    ledger.check(compression, 3 * TOLERANCE[torch.float32])


class _NoReading(TorchDispatchMode):
    """Fails where the host reads an element of a tensor, which waits for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_the_host_never_reads_the_scale(rank: int) -> None:
    """Scales and reduces gradients under a changing scale, which another scaler then loads."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    ddp, compression = make_compressed(SHAPES, OPTIONS, scaler=scaler, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    ledger, scales = Ledger(), []
    for i in range(8):
        optimizer.zero_grad()
        outputs = ddp(gradients(SHAPES, rank, i))
        with _NoReading():  # type: ignore[no-untyped-call]
            scaler.scale(outputs).backward()
        scaler.unscale_(optimizer)
        ledger.add(outputs_of(ddp), mean_gradients(SHAPES, 2, i))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if i == 4:  # another tensor takes the place of the scale
            scaler._scale = torch.full((), 4.0)
    assert len(set(scales)) >= 4
    ledger.check(compression)


@on_ranks(2)
def test_one_scaler_for_two_models(rank: int) -> None:
    """The second skips a step, the first does not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    shapes = {name: SHAPES[name] for name in MATRICES}
    models = [make_compressed(shapes, OPTIONS, scaler=scaler, bucket_cap_mb=1e-4) for _ in "ab"]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.0) for ddp, _ in models]
    ledgers = [Ledger(), Ledger()]
    for i in range(5):
        for k, ((ddp, _), optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = gradients(shapes, rank, 2 * i + k)
            means = mean_gradients(shapes, 2, 2 * i + k)
            bad = (i, k) == (2, 1)
            if bad:
                del means["first"]
                mine["first"][0, 0] = INF if rank == 0 else 1.0
            optimizer.zero_grad()
            scaler.scale(ddp(mine)).backward()
            scaler.unscale_(optimizer)
            ledgers[k].add({} if bad else outputs_of(ddp), means)
            scaler.step(optimizer)
        scaler.update()
    for ledger, (_, compression) in zip(ledgers, models, strict=True):
        ledger.check(compression)
    assert scaler.get_scale() == 2.0


@on_ranks(2)
def test_what_a_scaler_may_be(rank: int) -> None:
    ddp = make_ddp(SHAPES)
    wrong: list[Any] = ["auto", 1024.0]
    for scaler in wrong:
        with pytest.raises(ValueError, match=r"scaler must be a torch\.amp\.GradScaler, got"):
            tp.attach(ddp, OPTIONS, scaler=scaler)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    tp.attach(ddp, OPTIONS, scaler=disabled)
    disabled.scale(ddp(gradients(SHAPES, rank, 0))).backward()
    disabled.step(torch.optim.SGD(ddp.parameters(), lr=0.1))
    expected = -0.1 * mean_gradients(SHAPES, 2, 0)["bias"]
    assert relative_error(weights_of(ddp)["bias"], expected) < 1e-6


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]
)
def test_a_copy_of_a_scaler_is_one_of_its_own(
    copied: Callable[[torch.amp.GradScaler], torch.amp.GradScaler],
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    reducer: Any = Mock(states=Mock(loss_scale=None))
    for _ in range(2):  # two models
        grad_scaler.follow(scaler, reducer, {torch.ones(1): 0})
    scaler.scale(torch.ones(1))
    other = copied(scaler)
    other.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert other.scale(torch.ones(1)).item() == 2.0
    assert scaler.get_scale() == 8.0
    assert reducer.states.loss_scale is scaler._scale
