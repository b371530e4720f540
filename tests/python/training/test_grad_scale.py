# SPDX-License-Identifier: BSD-3-Clause
"""The loss scale may change at any time, because the residuals follow it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    SHAPES,
    Arrays,
    Tensors,
    from_bytes,
    gradients,
    make_compressed,
    relative_error,
    residuals_of,
    step,
    to_bytes,
    to_numpy,
)

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
# Powers of two scale exactly in floating point. The other scales round each gradient, residual and
# output once more, as in test_reference.
TOLERANCE = 2e-5

SCALES = {
    "constant": [1024.0] * 6,
    "powers": [2.0**16, 2.0**16, 2.0**15, 2.0**17, 1.0, 1.0],
    "others": [1000.0, 3.0, 3.0, 0.07, 5e4, 11.0],
}


def _outputs(
    rank: int, scales: list[float], announced: bool, wire: str | None = None
) -> tuple[list[Arrays], dict[str, float]]:
    """The outputs in the units of the unscaled gradient."""
    ddp, compression = make_compressed(SHAPES, replace(OPTIONS, wire_dtype=wire))
    outputs = []
    for i, scale in enumerate(scales):
        if announced:
            compression.grad_scale = scale
        scaled = step(ddp, _scaled(scale, rank, i))
        outputs.append(to_numpy({name: output / scale for name, output in scaled.items()}))
    return outputs, compression.stats()["residual_norms"]


def _scaled(scale: float, rank: int, i: int) -> Tensors:
    return {name: scale * g for name, g in gradients(SHAPES, rank, i).items()}


def _worst(outputs: list[Arrays], expected: list[Arrays]) -> float:
    return max(
        relative_error(torch.from_numpy(mine[name]), torch.from_numpy(wanted[name]))
        for mine, wanted in zip(outputs, expected, strict=True)
        for name in wanted
    )


@pytest.mark.parametrize("name", SCALES)
def test_a_scaled_run_is_the_unscaled_one(name: str) -> None:
    expected, norms = ranks.run(2, _outputs, [1.0] * 6, True)[0]
    scales = SCALES[name]
    outputs, scaled_norms = ranks.run(2, _outputs, scales, True)[0]
    assert _worst(outputs, expected) < TOLERANCE
    for parameter, norm in norms.items():
        assert scaled_norms[parameter] == pytest.approx(norm * scales[-1], rel=TOLERANCE)


@pytest.mark.parametrize("wire", ["bfloat16", "float16", "int8", "int4"])
def test_a_scaled_run_on_a_wire_that_rounds(wire: str) -> None:
    expected, _ = ranks.run(2, _outputs, [1.0] * 6, True, wire)[0]
    scales = SCALES["powers"]  # others would round to other codes
    outputs, _ = ranks.run(2, _outputs, scales, True, wire)[0]
    assert _worst(outputs, expected) < TOLERANCE


def test_the_backend_must_know_the_scale() -> None:
    # Otherwise the test above would prove nothing.
    expected, _ = ranks.run(2, _outputs, [1.0] * 6, True)[0]
    outputs, _ = ranks.run(2, _outputs, SCALES["powers"], False)[0]
    assert _worst(outputs, expected) > 0.1


def _overflow(rank: int, bad: bool) -> list[Arrays]:
    """Trains as with a GradScaler: a step overflows and the scale is halved."""
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    scale, outputs = 4096.0, []
    for i in range(6):
        if i == 3:
            if bad:
                compression.grad_scale = scale
                mine = gradients(SHAPES, rank, "bad")
                mine["wide"][0, 0] = float("inf") if rank == 1 else 0
                assert step(ddp, mine)["wide"].isnan().all()
            scale /= 2
        compression.grad_scale = scale
        outputs.append(to_numpy(step(ddp, _scaled(scale, rank, i))))
    return outputs


def test_a_skipped_step_and_a_new_scale_together() -> None:
    expected = ranks.run(2, _overflow, False)[0]
    assert _worst(ranks.run(2, _overflow, True)[0], expected) < TOLERANCE


def _checkpoint(
    rank: int, state: bytes | None, scale: float
) -> tuple[float, bytes | Arrays, Arrays]:
    """Two steps at a scale and the state, or the residuals after loading it at this scale."""
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    compression.grad_scale = scale
    if state is None:
        for i in range(3):
            step(ddp, _scaled(scale, rank, i))
        saved = compression.state_dict()
        return saved["grad_scale"], to_bytes(saved), to_numpy(residuals_of(compression))
    compression.load_state_dict(from_bytes(state))
    residuals = to_numpy(residuals_of(compression))
    output = to_numpy(step(ddp, _scaled(scale, rank, 3)))
    return compression.state_dict()["grad_scale"], residuals, output


def test_a_checkpoint_keeps_its_scale() -> None:
    saved_scale, state, saved = ranks.run(2, _checkpoint, None, 1024.0)[0]
    assert saved_scale == 1024
    runs = {s: ranks.run(2, _checkpoint, state, s)[0] for s in (1024.0, 1.0, 48.0)}
    for scale, (current, residuals, _) in runs.items():
        assert current == scale
        for name, residual in residuals.items():
            value = torch.from_numpy(residual * 1024 / scale)
            assert relative_error(value, torch.from_numpy(saved[name])) < 1e-6
    for scale, (_, _, output) in runs.items():
        unscaled = {name: value * 1024 / scale for name, value in output.items()}
        assert _worst([unscaled], [runs[1024.0][2]]) < TOLERANCE


def _bad_scales(rank: int) -> float:
    _, compression = make_compressed(SHAPES, OPTIONS)
    scales: list[Any] = [0.0, -2.0, float("inf"), float("nan"), 10**400, None, "2", []]
    for scale in scales:
        with pytest.raises(ValueError, match="^grad_scale must be a finite number > 0"):
            compression.grad_scale = scale
    return compression.grad_scale


def test_a_bad_scale_is_refused() -> None:
    assert ranks.run(1, _bad_scales) == [1.0]
