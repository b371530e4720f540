# SPDX-License-Identifier: BSD-3-Clause
"""The loss scale may change at any time, because the residuals follow it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import torch_powersgd as tp
from support.ddp import make_compressed, step
from support.ledger import residuals_of
from support.on_ranks import on_ranks
from support.states import from_bytes, own_part, to_bytes
from support.synthetic import SHAPES, gradients
from support.tensors import Tensors, relative_error

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
# Powers of two scale exactly in floating point. The other scales round each gradient, residual and
# output once more, as in test_reference.
TOLERANCE = 2e-5

SCALES = {
    "constant": [1024.0] * 6,
    "powers": [2.0**16, 2.0**16, 2.0**15, 2.0**17, 1.0, 1.0],
    "others": [1000.0, 3.0, 3.0, 0.07, 5e4, 11.0],
}


def _scaled(scale: float, rank: int, i: int) -> Tensors:
    return {name: scale * g for name, g in gradients(SHAPES, rank, i).items()}


def _worst(outputs: Tensors, expected: Tensors, scale: float) -> float:
    """The largest error of outputs that were scaled."""
    return max(relative_error(outputs[name] / scale, expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("name", "wire", "announced"),
    [
        ("constant", None, True),
        ("powers", None, True),
        ("others", None, True),
        ("powers", "int8", True),  # others would round to other codes
        ("powers", None, False),  # otherwise the test would prove nothing
    ],
)
@on_ranks(2)
def test_a_scaled_run_is_the_unscaled_one(
    rank: int, name: str, wire: str | None, announced: bool
) -> None:
    options = replace(OPTIONS, wire_dtype=wire)
    (plain, of_plain), (ddp, compression) = (make_compressed(SHAPES, options) for _ in range(2))
    errors = []
    for i, scale in enumerate(SCALES[name]):
        if announced:
            compression.grad_scale = scale
        expected = step(plain, gradients(SHAPES, rank, i))
        errors.append(_worst(step(ddp, _scaled(scale, rank, i)), expected, scale))
    if not announced:
        assert max(errors) > 0.1
        return
    assert max(errors) < TOLERANCE, errors
    norms = compression.stats()["residual_norms"]
    for parameter, norm in of_plain.stats()["residual_norms"].items():
        assert norms[parameter] == pytest.approx(norm * SCALES[name][-1], rel=TOLERANCE)


@pytest.mark.parametrize("per_rank", [False, True])
@on_ranks(2)
def test_a_checkpoint_keeps_its_scale(rank: int, per_rank: bool) -> None:
    first, of_first = make_compressed(SHAPES, OPTIONS)
    of_first.grad_scale = 1024.0
    for i in range(3):
        step(first, _scaled(1024.0, rank, i))
    saved = to_bytes(of_first.state_dict(per_rank))
    assert own_part(from_bytes(saved))["grad_scale"] == 1024
    expected: Tensors = {}
    for scale in (1024.0, 1.0, 48.0):
        ddp, compression = make_compressed(SHAPES, OPTIONS)
        compression.grad_scale = scale
        compression.load_state_dict(from_bytes(saved))
        assert compression.state_dict()["grad_scale"] == scale
        for name, residual in residuals_of(compression).items():
            assert relative_error(residual, residuals_of(of_first)[name]) < 1e-6
        outputs = step(ddp, _scaled(scale, rank, 3))
        expected = expected or {name: output / scale for name, output in outputs.items()}
        assert _worst(outputs, expected, scale) < TOLERANCE


@on_ranks(1)
def test_a_bad_scale_is_refused(rank: int) -> None:
    _, compression = make_compressed(SHAPES, OPTIONS)
    scales: list[Any] = [0.0, -2.0, float("inf"), float("nan"), 10**400, None, "2", []]
    for scale in scales:
        with pytest.raises(ValueError, match="^grad_scale must be a finite number > 0"):
            compression.grad_scale = scale
    assert compression.grad_scale == 1.0
