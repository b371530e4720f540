# SPDX-License-Identifier: BSD-3-Clause
"""The outputs of attached DDP, step by step, against the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.reference import Matrix, PowerSGD
from support.synthetic import (
    Array,
    Arrays,
    gradients,
    make_compressed,
    mean_gradients,
    step,
    to_numpy,
)
from torch_powersgd._core import _C

WORLD_SIZE = 2
STEPS = 6
# The shapes have odd sizes and both orientations, one is a convolution, and some cap the rank.
SHAPES = {
    "wide": (11, 67),
    "tall": (83, 13),
    "square": (40, 40),
    "conv": (24, 5, 3, 3),
    "vector": (57,),
    "row": (1, 29),
    "column": (31, 1),
    "two_rows": (2, 35),
}
# With this rate every matrix is compressed, the degenerate ones too: r = min(rank, n, m).
ALWAYS = 1e-3


def _outputs(rank: int, options: tp.Options, dtype: torch.dtype) -> tuple[list[Arrays], Arrays]:
    ddp, compression = make_compressed(SHAPES, options, dtype)
    outputs = [to_numpy(step(ddp, gradients(SHAPES, rank, i, dtype))) for i in range(STEPS)]
    return outputs, to_numpy(
        {name: saved["residual"] for name, saved in compression.state_dict()["parameters"].items()}
    )


def _core_start(cols: int, index: int, options: tp.Options, dtype: torch.dtype, i: int) -> Array:
    """The core's random Q, [cols, r], of the parameter of this index at step i.

    The projection of the identity matrix is Q itself. The matrices before it give it its index.
    """
    shapes = [(2, 2)] * index + [(cols, cols)]
    cold = tp.Options.hook_defaults(
        matrix_approximation_rank=options.matrix_approximation_rank,
        min_compression_rate=ALWAYS,
        warm_start=False,
        random_seed=options.random_seed,
    )
    core = _C.BucketCompressor(shapes, cold._core(), dtype)
    bucket = torch.cat([torch.zeros(4 * index, dtype=dtype), torch.eye(cols, dtype=dtype).view(-1)])
    payload = core.project(bucket, i).double().numpy()
    r = min(options.matrix_approximation_rank, cols)
    before = 2 * index * min(options.matrix_approximation_rank, 2)
    return payload[before : before + cols * r].reshape(cols, r)


def _reference_outputs(
    name: str, options: tp.Options, dtype: torch.dtype
) -> tuple[list[Array], PowerSGD]:
    index = list(SHAPES).index(name)
    by_step = [
        [_as_matrix(gradients(SHAPES, rank, i, dtype)[name]) for rank in range(WORLD_SIZE)]
        for i in range(STEPS)
    ]
    rows, cols = by_step[0][0].shape
    r = min(options.matrix_approximation_rank, rows, cols)
    starts = [_core_start(cols, index, options, dtype, i)[:, :r] for i in range(STEPS)]
    model = PowerSGD(
        WORLD_SIZE,
        starts[0],
        error_feedback=options.use_error_feedback,
        warm_start=options.warm_start,
    )
    outputs = [model.step(by_step[i], starts[i]) for i in range(STEPS)]
    return [output.reshape(SHAPES[name]) for output in outputs], model


def _as_matrix(gradient: torch.Tensor) -> Matrix:
    """A contiguous weight as compression sees it: shape[0] x the rest, a vector as one row."""
    rows = gradient.shape[0] if gradient.dim() > 1 else 1
    matrix: Matrix = gradient.double().numpy().reshape(rows, -1)
    return matrix


def _relative(value: Array, expected: Array) -> float:
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


# The span of P = M Q is known to the rounding of P times its condition number, some tens for these
# matrices at rank 4. Warm start and residual carry that from step to step. Six steps of it should
# stay below 200 units of rounding. There is no wider type for the Gram matrix of float64, which
# costs the condition number once more. The errors measured were 5e-6 and 4e-13.
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
# Gradients of two bytes are exact in float32, so the core's own arithmetic is as above. The output
# is rounded once, by at most half a unit in the last place of each element.
for _half in (torch.bfloat16, torch.float16):
    TOLERANCE[_half] = torch.finfo(_half).eps / 2 + TOLERANCE[torch.float32]

# The residual is never rounded to the gradient's dtype.
RESIDUAL_TOLERANCE = {
    dtype: TOLERANCE[torch.float64 if dtype == torch.float64 else torch.float32]
    for dtype in TOLERANCE
}

CASES = [
    (torch.float32, {"matrix_approximation_rank": 1}),
    (torch.float32, {"matrix_approximation_rank": 4}),
    (torch.float32, {"matrix_approximation_rank": 3, "warm_start": False}),
    (torch.float32, {"matrix_approximation_rank": 2, "use_error_feedback": False}),
    (
        torch.float32,
        {"matrix_approximation_rank": 2, "use_error_feedback": False, "warm_start": False},
    ),
    (torch.float64, {"matrix_approximation_rank": 4}),
    (torch.float64, {"matrix_approximation_rank": 2, "warm_start": False, "random_seed": 7}),
    (torch.bfloat16, {"matrix_approximation_rank": 3}),
    (torch.float16, {"matrix_approximation_rank": 2, "warm_start": False}),
]


def _id(value: dict[str, int] | torch.dtype) -> str:
    if isinstance(value, dict):
        return "-".join(str(setting) for setting in value.values())
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("dtype", "fields"), CASES, ids=_id)
def test_outputs_follow_the_reference(dtype: torch.dtype, fields: dict[str, Any]) -> None:
    options = tp.Options.hook_defaults(start_powerSGD_iter=0, min_compression_rate=ALWAYS, **fields)
    (outputs, residuals), (other_outputs, _) = ranks.run(WORLD_SIZE, _outputs, options, dtype)
    assert "weights.square" in residuals
    for name in SHAPES:
        expected, model = _reference_outputs(name, options, dtype)
        if options.use_error_feedback:
            # In units of the outputs, because the residual is 0 where the rank is full.
            lost = residuals[f"weights.{name}"] - model.mean_residual().reshape(SHAPES[name])
            scale = np.linalg.norm(expected[-1])
            assert np.linalg.norm(lost) < RESIDUAL_TOLERANCE[dtype] * scale, name
        else:
            assert not residuals[f"weights.{name}"].any()
        for i in range(STEPS):
            error = _relative(outputs[i][name], expected[i])
            assert error < TOLERANCE[dtype], (name, i, error)
            assert np.array_equal(outputs[i][name], other_outputs[i][name]), (name, i)


def test_full_rank_is_exact() -> None:
    # With r = min(n, m) nothing is left out: the output is the mean.
    options = tp.Options.hook_defaults(
        start_powerSGD_iter=0, min_compression_rate=ALWAYS, matrix_approximation_rank=2
    )
    outputs, _ = ranks.run(WORLD_SIZE, _outputs, options, torch.float32)[0]
    for i in range(STEPS):
        for name in ("row", "column", "two_rows"):
            mean = mean_gradients(SHAPES, WORLD_SIZE, i)[name].numpy()
            assert _relative(outputs[i][name], mean) < 2e-6, (name, i)


def test_the_reference_would_see_another_algorithm() -> None:
    # Residual, warm start and random start must change the reference's outputs. Otherwise agreement
    # with the core would prove nothing.
    plain = tp.Options.hook_defaults(matrix_approximation_rank=3)
    expected, _ = _reference_outputs("square", plain, torch.float64)
    for fields in ({"use_error_feedback": False}, {"warm_start": False}, {"random_seed": 1}):
        changed = tp.Options.hook_defaults(matrix_approximation_rank=3, **fields)
        outputs, _ = _reference_outputs("square", changed, torch.float64)
        assert _relative(outputs[-1], expected[-1]) > 0.1, fields
