# SPDX-License-Identifier: BSD-3-Clause
"""A warm start with noise: the same on all ranks, and of no harm to the identity."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Arrays,
    Ledger,
    gradients,
    make_compressed,
    mean_gradients,
    own_part,
    residuals_of,
    step,
    to_numpy,
)

OPTIONS = tp.Options.hook_defaults(
    start_powerSGD_iter=0, matrix_approximation_rank=3, warm_start_noise=0.5
)
STEPS = 12
IDENTITY_TOLERANCE = 1e-5  # as in test_identity.py


def _trained(
    rank: int, world_size: int, options: tp.Options
) -> tuple[dict[str, float], list[bytes], Arrays]:
    """The errors of the identity, the outputs of all steps, and Q at the end."""
    ddp, compression = make_compressed(SHAPES, options)
    ledger, outputs = Ledger(), []
    for i in range(STEPS):
        output = step(ddp, gradients(SHAPES, rank, i))
        ledger.add(output, mean_gradients(SHAPES, world_size, i))
        outputs += [tensor.numpy().tobytes() for tensor in output.values()]
    state = own_part(compression.state_dict(per_rank=True))["parameters"]
    q_warm = to_numpy({n: tensors["q_warm"] for n, tensors in state.items() if "q_warm" in tensors})
    return ledger.errors(residuals_of(compression)), outputs, q_warm


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_identity_holds_and_all_ranks_have_the_same_bits(
    world_size: int, wire_dtype: torch.dtype | None
) -> None:
    options = dataclasses.replace(OPTIONS, wire_dtype=wire_dtype)
    results = ranks.run(world_size, _trained, world_size, options)
    _, first_outputs, first_q = results[0]
    for errors, outputs, q_warm in results:
        assert max(errors.values()) < IDENTITY_TOLERANCE, errors
        assert outputs == first_outputs
        assert {n: q.tobytes() for n, q in q_warm.items()} == {
            n: q.tobytes() for n, q in first_q.items()
        }


def _mean_square(q_warm: Arrays) -> float:
    """The mean over all rows of their squared norms."""
    rows = torch.cat([torch.from_numpy(q).square().sum(1) for q in q_warm.values()])
    assert len(rows) == len(COMPRESSED) * OPTIONS.matrix_approximation_rank
    return rows.mean().item()


def test_the_noise_has_the_given_size() -> None:
    without = dataclasses.replace(OPTIONS, warm_start_noise=0)
    _, plain_outputs, plain = ranks.run(2, _trained, 2, without)[0]
    _, outputs, noisy = ranks.run(2, _trained, 2, OPTIONS)[0]
    assert _mean_square(plain) == pytest.approx(1, abs=1e-6)
    # Nine rows of 9 to 75 elements. A squared norm is 1 + 0.25 + the product of the row and its
    # noise, of standard deviation 2 * 0.5 / sqrt(m), less than 0.34. Four errors of the mean:
    assert _mean_square(noisy) == pytest.approx(1.25, abs=4 * 0.34 / 3)
    assert _mean_square(noisy) > 1.01
    assert outputs != plain_outputs
