# SPDX-License-Identifier: BSD-3-Clause
"""Mixed precision: the residual follows the loss scale, and a skipped step loses nothing.

Both tests use the identity of test_identity in the units of the unscaled gradient. It excludes the
gradients of a bucket that was not finite.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    Ledger,
    Tensors,
    gradient,
    gradients,
    make_compressed,
    make_ddp,
    mean_gradients,
    relative_error,
    step,
    weights_of,
)
from torch_powersgd import grad_scaler

# Each has a bucket of its own. "bias" is a raw segment and has no residual.
SHAPES = {"first": (30, 40), "second": (35, 25), "bias": (30,)}
MATRICES = ("first", "second")
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
TOLERANCE = 1e-5  # float32, as in test_identity; scales are powers of 2 and round nothing
INF = float("inf")


def _residuals(compression: tp.Compression) -> Tensors:
    state = compression.state_dict()
    return {
        name.removeprefix("weights."): saved["residual"].cpu().double() / state["grad_scale"]
        for name, saved in state["parameters"].items()
    }


def _errors(ledger: Ledger, compression: tp.Compression) -> dict[str, float]:
    found = ledger.errors(_residuals(compression))
    return {name: found[name] for name in MATRICES}


def with_scaler(
    rank: int,
    bad: dict[int, tuple[str, int]],
    attached_with_scaler: bool,
    device: str = "cpu",
) -> tuple[dict[str, float], list[float], int]:
    """Runs eight steps.

    Args:
        bad: the gradient that is not finite at a step, and on which rank: {step: (name, rank)}.
    """
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=2)
    known = scaler if attached_with_scaler else None
    ddp, compression = make_compressed(
        SHAPES, OPTIONS, scaler=known, bucket_cap_mb=1e-4, device=device
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    ledger, scales = Ledger(), []
    for i in range(8):
        mine, means = gradients(SHAPES, rank, i), mean_gradients(SHAPES, 2, i)
        name, where = bad.get(i, (None, None))
        if name:
            lost = SHAPES if i == 0 else [name]  # DDP's first step has a single bucket
            means = {n: mean for n, mean in means.items() if n not in lost}
            if where == rank:
                mine[name].view(-1)[3] = INF
        optimizer.zero_grad()
        scaler.scale(ddp({n: tensor.to(device) for n, tensor in mine.items()})).backward()
        scaler.unscale_(optimizer)
        applied = {n: p.grad.cpu().clone() for n, p in ddp.module.weights.items()}
        scaler.step(optimizer)
        finite = all(torch.isfinite(grad).all() for grad in applied.values())
        ledger.add(applied if finite else {}, means)
        scaler.update()
        scales.append(scaler.get_scale())
    return _errors(ledger, compression), scales, compression.stats()["skipped_steps"]


BAD = {
    "none": {},
    "one": {3: ("first", 1)},
    "first-step": {0: ("second", 0)},
    "twice": {4: ("second", 1), 5: ("first", 0)},
    "raw": {2: ("bias", 1)},
}


@pytest.mark.parametrize("case", BAD)
def test_a_scaler_that_skips_loses_nothing_of_the_other_buckets(case: str) -> None:
    for errors, scales, _ in ranks.run(2, with_scaler, BAD[case], True):
        assert len(set(scales)) >= 3, "the scale has changed"
        assert max(errors.values()) < TOLERANCE, errors


def test_without_the_scaler_the_residual_is_in_other_units() -> None:
    """Shows that the test above can fail: the scale grows unannounced."""
    for errors, _, _ in ranks.run(2, with_scaler, {}, False):
        assert max(errors.values()) > 100 * TOLERANCE, errors


def _two_optimizers_of_one(rank: int) -> dict[str, float]:
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
    return _errors(ledger, compression)


def test_a_scaler_that_skips_one_optimizer_of_two_delivers_nothing_twice() -> None:
    for errors in ranks.run(2, _two_optimizers_of_one):
        # Differences of weights, which are some ten times larger than a gradient, are rounded.
        assert max(errors.values()) < 3 * TOLERANCE, errors


class _NoReading(TorchDispatchMode):
    """Fails where the host reads an element of a tensor, which waits for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"
        return func(*args, **(kwargs or {}))


def _not_read(rank: int) -> tuple[dict[str, float], list[float]]:
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
        applied = {n: p.grad.cpu().clone() for n, p in ddp.module.weights.items()}
        ledger.add(applied, mean_gradients(SHAPES, 2, i))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if i == 4:  # another tensor takes the place of the scale
            scaler._scale = torch.full((), 4.0)
    return _errors(ledger, compression), scales


def test_the_host_never_reads_the_scale() -> None:
    for errors, scales in ranks.run(2, _not_read):
        assert len(set(scales)) >= 4
        assert max(errors.values()) < TOLERANCE, errors


def _dropped(rank: int, announced: bool) -> dict[str, float]:
    """The optimizer drops the outputs of steps 0, 3 and 4 for a reason of its own."""
    ddp, compression = make_compressed(SHAPES, OPTIONS, bucket_cap_mb=1e-4)
    ledger = Ledger()
    for i in range(7):
        outputs = step(ddp, gradients(SHAPES, rank, i))
        if i in (0, 3, 4):
            outputs = {}
            if announced:
                compression.step_skipped()
                compression.step_skipped()  # a second call changes nothing
        ledger.add(outputs, mean_gradients(SHAPES, 2, i))
    return _errors(ledger, compression)


@pytest.mark.parametrize("announced", [True, False])
def test_step_skipped(announced: bool) -> None:
    for errors in ranks.run(2, _dropped, announced):
        assert (max(errors.values()) < TOLERANCE) is announced, errors


def _exact_between(rank: int) -> dict[str, float]:
    """A parameter that was not compressed in the dropped step keeps nothing of an earlier one."""
    ddp, compression = make_compressed(SHAPES, OPTIONS, bucket_cap_mb=1e-4)
    ledger = Ledger()
    for i in range(4):
        with tp.scope("never") if i == 2 else nullcontext():
            outputs = step(ddp, gradients(SHAPES, rank, i))
        means = mean_gradients(SHAPES, 2, i)
        if i == 2:  # sent exactly and dropped: gone, as it is without compression
            compression.step_skipped()
        else:
            ledger.add(outputs, means)
    return _errors(ledger, compression)


def test_step_skipped_after_an_exact_step() -> None:
    for errors in ranks.run(2, _exact_between):
        assert max(errors.values()) < TOLERANCE, errors


def _half(rank: int) -> tuple[float, list[int], float]:
    """Half-precision gradients whose average, with the residual, is beyond 65504.

    Two orthogonal patterns are about equal in size at rank 1: each step sends the one with more
    residual. The gradient is at most 1.99 * 32866 = 65403. The third step outputs 2 * 32866.
    """
    shapes = {"first": (32, 32)}
    rows = torch.tensor([1.0, -1.0]).repeat(16)
    columns = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(8)
    both = torch.outer(torch.ones(32), columns) + torch.outer(rows, torch.ones(32)) * 0.99
    ddp, compression = make_compressed(
        shapes,
        tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=1),
        torch.float16,
    )
    scale, ledger, dropped = 2.0**15, Ledger(), []
    for i in range(8):
        compression.grad_scale = scale
        mine = (both * 1.003).half()
        outputs = {n: out.double() / scale for n, out in step(ddp, {"first": mine * scale}).items()}
        ledger.means["first"] = ledger.means.get("first", 0) + mine.double()
        if torch.isfinite(outputs["first"]).all():
            ledger.outputs["first"] = ledger.outputs.get("first", 0) + outputs["first"]
        else:
            dropped.append(i)
            compression.step_skipped()
            scale /= 2
    return ledger.errors(_residuals(compression))["first"], dropped, scale


def test_half_precision_outputs_that_overflow_are_not_lost() -> None:
    # Outputs are rounded to half precision, 2^-11 of each. The residual does not have that
    # rounding.
    for error, dropped, scale in ranks.run(2, _half):
        assert dropped, "nothing has overflowed"
        assert scale >= 2.0**12
        assert error < 2**-11


def _two_optimizers(rank: int) -> tuple[list[dict[str, float]], float]:
    """One scaler and two models: the second skips a step, the first does not."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    shapes = {"first": (30, 40), "second": (35, 25)}
    models = [make_compressed(shapes, OPTIONS, scaler=scaler, bucket_cap_mb=1e-4) for _ in "ab"]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.0) for ddp, _ in models]
    ledgers = [Ledger(), Ledger()]
    for i in range(5):
        for k, ((ddp, _), optimizer) in enumerate(zip(models, optimizers, strict=True)):
            mine = {n: gradient(s, n, rank, i, k) for n, s in shapes.items()}
            both = [{n: gradient(s, n, r, i, k) for n, s in shapes.items()} for r in range(2)]
            means = {n: (both[0][n].double() + both[1][n].double()) / 2 for n in shapes}
            bad = (i, k) == (2, 1)
            if bad:
                del means["first"]
                mine["first"][0, 0] = INF if rank == 0 else 1.0
            optimizer.zero_grad()
            scaler.scale(ddp(mine)).backward()
            scaler.unscale_(optimizer)
            applied = {n: p.grad.clone() for n, p in ddp.module.weights.items()}
            scaler.step(optimizer)
            ledgers[k].add({} if bad else applied, means)
        scaler.update()
    errors = [_errors(ledger, c) for ledger, (_, c) in zip(ledgers, models, strict=True)]
    return errors, scaler.get_scale()


def test_one_scaler_for_two_models() -> None:
    for errors, scale in ranks.run(2, _two_optimizers):
        assert scale == 2.0
        for of_model in errors:
            assert max(of_model.values()) < TOLERANCE, errors


def _autocast(rank: int, backend_attached: bool) -> tuple[float, bytes]:
    """Trains a small network under autocast, with a scaler; returns the last loss and weights."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 10))
    ddp = torch.nn.parallel.DistributedDataParallel(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
    if backend_attached:
        tp.attach(ddp, OPTIONS, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    target = torch.nn.Linear(64, 10).requires_grad_(False)
    for i in range(60):
        inputs = gradient((32, 64), "inputs", rank, i)
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(ddp(inputs), target(inputs).argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    inputs = gradient((512, 64), "validation")
    with torch.no_grad():
        final = torch.nn.functional.cross_entropy(net(inputs), target(inputs).argmax(1)).item()
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    return final, weights.numpy().tobytes()


def test_autocast_trains_as_without_compression() -> None:
    plain = ranks.run(2, _autocast, False)[0][0]
    (one, first), (two, second) = ranks.run(2, _autocast, True)
    assert one == two
    assert first == second, "replicas"
    # The loss begins at ln 10 = 2.3. A broken residual or scale stays far from these bounds.
    assert plain < 1.0
    assert one < plain + 0.2


def _refused(rank: int) -> float:
    ddp = make_ddp(SHAPES)
    wrong: list[Any] = ["auto", 1024.0]
    for scaler in wrong:
        with pytest.raises(ValueError, match=r"scaler must be a torch\.amp\.GradScaler, got"):
            tp.attach(ddp, OPTIONS, scaler=scaler)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    tp.attach(ddp, OPTIONS, scaler=disabled)
    loss = disabled.scale(ddp(gradients(SHAPES, rank, 0)))
    loss.backward()
    disabled.step(torch.optim.SGD(ddp.parameters(), lr=0.1))
    return relative_error(ddp.module.weights["bias"], -0.1 * mean_gradients(SHAPES, 2, 0)["bias"])


def test_what_a_scaler_may_be() -> None:
    assert max(ranks.run(2, _refused)) < 1e-6


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))]
)
def test_a_copy_of_a_scaler_is_one_of_its_own(
    copied: Callable[[torch.amp.GradScaler], torch.amp.GradScaler],
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    reducer: Any = Mock(states=Mock(loss_scale=None, names=["weight"]))
    for _ in range(2):  # two models
        grad_scaler.follow(scaler, reducer, {"weight": torch.ones(1)})
    scaler.scale(torch.ones(1))
    other = copied(scaler)
    other.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert other.scale(torch.ones(1)).item() == 2.0
    assert scaler.get_scale() == 8.0
    assert reducer.states.loss_scale is scaler._scale
