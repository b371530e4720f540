# SPDX-License-Identifier: BSD-3-Clause
"""The outputs of attached DDP, step by step, against the class of docs/algorithm.md in float64.

That shares no code with the core. Its orthonormal basis comes from Gram-Schmidt, the core's from
Cholesky QR. The outputs depend on the span of the basis alone, so they can be compared; the factors
cannot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import torch_powersgd as tp
from support.ddp import make_compressed, train
from support.ledger import residuals_of
from support.on_ranks import all_agree, on_ranks
from support.repository import ROOT
from support.synthetic import gradients
from support.tensors import digest
from torch_powersgd._core import _C
from torch_powersgd.options import to_core

Matrix = npt.NDArray[np.float64]

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
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, min_compression_rate=ALWAYS)


def _power_sgd() -> Any:
    """The class that docs/algorithm.md begins with."""
    code = (ROOT / "docs/algorithm.md").read_text().split("```python\n")[1].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    return names["PowerSGD"]


def _core_start(cols: int, index: int, options: tp.Options, dtype: torch.dtype, i: int) -> Matrix:
    """The core's random Q, [cols, r], of the parameter of this index at step i.

    The projection of the identity matrix is Q itself. The matrices before it give it its index.
    """
    shapes = [(2, 2)] * index + [(cols, cols)]
    cold = replace(options, min_compression_rate=ALWAYS, warm_start=False)
    core = _C.BucketCompressor(shapes, to_core(cold), dtype)
    bucket = torch.cat([torch.zeros(4 * index, dtype=dtype), torch.eye(cols, dtype=dtype).view(-1)])
    payload = core.project(bucket, i).double().numpy()
    r = min(options.matrix_approximation_rank, cols)
    before = 2 * index * min(options.matrix_approximation_rank, 2)
    start: Matrix = payload[before : before + cols * r].reshape(cols, r)
    return start


def _reference_outputs(
    name: str, options: tp.Options, dtype: torch.dtype
) -> tuple[list[Matrix], Matrix]:
    """The outputs of each step, and the mean residual after them."""
    index, shape = list(SHAPES).index(name), SHAPES[name]
    # A contiguous weight as compression sees it: shape[0] x the rest, a vector as one row.
    rows = shape[0] if len(shape) > 1 else 1
    by_step = [
        [
            gradients(SHAPES, rank, i, dtype)[name].double().numpy().reshape(rows, -1)
            for rank in range(WORLD_SIZE)
        ]
        for i in range(STEPS)
    ]
    cols = by_step[0][0].shape[1]
    r = min(options.matrix_approximation_rank, rows, cols)
    starts = [_core_start(cols, index, options, dtype, i)[:, :r] for i in range(STEPS)]
    model = _power_sgd()(starts[0], WORLD_SIZE, options.use_error_feedback)
    outputs = []
    for i in range(STEPS):
        if not options.warm_start:
            model.q = starts[i]
        outputs.append(model.step(by_step[i]).reshape(shape))
    residual = np.broadcast_to(sum(model.residuals) / WORLD_SIZE, (rows, cols))
    return outputs, residual.reshape(shape)


# The span of P = M Q is known to the rounding of P times its condition number, some tens for these
# matrices at rank 4. Warm start and residual carry that from step to step. Six steps of it should
# stay below 200 units of rounding. The largest error measured was 5e-6.
TOLERANCE = 2e-5

CASES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"matrix_approximation_rank": 1}),
    (torch.float32, {"matrix_approximation_rank": 4}),
    (torch.float32, {"matrix_approximation_rank": 3, "warm_start": False}),
    (torch.float32, {"matrix_approximation_rank": 2, "use_error_feedback": False}),
    (torch.float32, {"matrix_approximation_rank": 2, "warm_start": False, "random_seed": 7}),
    (torch.bfloat16, {"matrix_approximation_rank": 3}),
    (torch.float16, {"matrix_approximation_rank": 2, "use_error_feedback": False}),
]


@pytest.mark.parametrize(("dtype", "fields"), CASES, ids=str)
@on_ranks(WORLD_SIZE)
def test_outputs_follow_the_reference(
    rank: int, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    options = replace(OPTIONS, **fields)
    ddp, compression = make_compressed(SHAPES, options, dtype)
    outputs = train(ddp, range(STEPS))
    residuals = residuals_of(compression)
    assert all_agree([digest(tensors.values()) for tensors in outputs])
    # Gradients of two bytes are exact in float32, so the core's own arithmetic is as there, and the
    # residual is never rounded to their dtype. The output is rounded once, by at most half a unit
    # in the last place of each element.
    rounded = TOLERANCE + (0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2)
    for name in SHAPES:
        expected, residual = _reference_outputs(name, options, dtype)
        for i in range(STEPS):
            error = np.linalg.norm(outputs[i][name].double().numpy() - expected[i])
            assert error < rounded * np.linalg.norm(expected[i]), (name, i, error)
        # In units of the outputs, because the residual is 0 where the rank is full.
        lost = np.linalg.norm(residuals[name].numpy() - residual)
        assert lost < TOLERANCE * np.linalg.norm(expected[-1]), (name, lost)


def test_the_reference_would_see_another_algorithm() -> None:
    # Residual, warm start and random start must change the reference's outputs. Otherwise agreement
    # with the core would prove nothing.
    plain = replace(OPTIONS, matrix_approximation_rank=3)
    expected, _ = _reference_outputs("square", plain, torch.float32)
    for fields in ({"use_error_feedback": False}, {"warm_start": False}, {"random_seed": 1}):
        outputs, _ = _reference_outputs("square", replace(plain, **fields), torch.float32)
        error = np.linalg.norm(outputs[-1] - expected[-1])
        assert error > 0.1 * np.linalg.norm(expected[-1]), fields
