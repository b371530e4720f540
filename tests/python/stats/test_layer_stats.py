# SPDX-License-Identifier: BSD-3-Clause
"""Compression.stats(per_layer=True), against norms that the test computes in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.ddp import make_compressed, step, train
from support.ledger import own_residuals_of
from support.on_ranks import on_ranks
from support.synthetic import COMPRESSED, SHAPES, gradients

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
FIELDS = {
    *("rows", "cols", "rank", "bytes_before", "bytes_after"),
    *("residual", "gradient", "residual_ratio", "captured"),
}


def _layers(compression: tp.Compression) -> dict[str, dict[str, Any]]:
    layers = compression.stats(per_layer=True)["layers"]
    return {name.removeprefix("weights."): layer for name, layer in layers.items()}


def _check_norms(rank: int, fields: dict[str, Any], rel: float) -> None:
    ddp, compression = make_compressed(SHAPES, fields)
    step(ddp, gradients(SHAPES, rank, 0))  # exact
    for layer in _layers(compression).values():
        assert layer.keys() == FIELDS
        assert layer["residual"] == 0
        assert layer["captured"] is layer["gradient"] is layer["residual_ratio"] is None
    residuals = {name: torch.zeros(()) for name in COMPRESSED}
    for i in range(1, 6):
        mine = gradients(SHAPES, rank, i)
        outputs = step(ddp, mine)
        layers = _layers(compression)
        before, residuals = residuals, own_residuals_of(compression)
        for name in COMPRESSED:
            layer, residual = layers[name], residuals[name]
            m = mine[name].double().view_as(residual) + before[name]
            assert (layer["rows"], layer["cols"]) == residual.shape
            assert layer["rank"] == 2
            kept = residual.norm().item()
            assert layer["residual"] == pytest.approx(kept, rel=1e-5)
            # |M|^2 = |q|^2 + |E|^2, up to the rounding of q and of the residual's storage.
            captured = 1 - (kept / m.norm().item()) ** 2
            assert 0 < captured < 1
            assert layer["captured"] == pytest.approx(captured, rel=rel)
            delivered = outputs[name].double().norm().item()
            assert layer["gradient"] == pytest.approx(delivered, rel=1e-5)
            assert layer["residual_ratio"] == pytest.approx(kept / delivered, rel=1e-5)


@pytest.mark.parametrize(
    ("world_size", "fields", "rel"),
    [
        pytest.param(3, {}, 1e-4, id="float32"),
        pytest.param(2, {"wire_dtype": torch.int8}, 0.02, id="int8"),
        pytest.param(2, {"residual_dtype": torch.bfloat16}, 0.02, id="bfloat16 residual"),
    ],
)
def test_norms_of_the_last_step(world_size: int, fields: dict[str, Any], rel: float) -> None:
    ranks.run(world_size, _check_norms, fields, rel, options=OPTIONS)


@on_ranks(options=OPTIONS)
def test_bytes_of_each_layer_and_flat_names(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES)
    train(ddp, range(3))
    layers = _layers(compression)
    assert layers.keys() == SHAPES.keys()
    sent = {"conv": (16 + 75) * 2, "wide": (12 + 41) * 2, "tall": (50 + 9) * 2}
    sent |= {"bias": 16, "small": 12}
    for name, layer in layers.items():
        assert layer["bytes_before"] == 4 * torch.Size(SHAPES[name]).numel()
        assert layer["bytes_after"] == pytest.approx(4 * sent[name], abs=8)  # a use
        assert (layer["rank"] == 0) == (name not in COMPRESSED)
    assert layers["bias"]["captured"] is None
    flat = compression.stats(per_layer=True, flat=True)
    assert flat["layers/weights.wide/captured"] == layers["wide"]["captured"]
    assert "layers/weights.bias/captured" not in flat
    assert "layers" not in compression.stats()


@on_ranks(options=OPTIONS)
def test_a_step_that_delivered_nothing_captured_nothing(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, find_unused_parameters=True)
    train(ddp, range(3))
    used = gradients(SHAPES, rank, 3)
    del used["wide"]
    step(ddp, used)
    layers = _layers(compression)
    assert layers["wide"]["captured"] is layers["wide"]["gradient"] is None
    assert layers["wide"]["residual"] > 0
    assert layers["tall"]["captured"] > 0
    step(ddp, {name: g * float("nan") for name, g in gradients(SHAPES, rank, 4).items()})
    assert all(layer["captured"] is None for layer in _layers(compression).values())


@on_ranks(options=dataclasses.replace(OPTIONS, use_error_feedback=False))
def test_without_error_feedback_nothing_is_known_of_m(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES)
    train(ddp, range(3))
    layer = _layers(compression)["wide"]
    assert layer["captured"] is None
    assert layer["residual"] == 0
    assert layer["gradient"] > 0


@on_ranks(options=OPTIONS)
def test_norms_are_in_the_units_of_the_loss_scale(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES)
    for i in range(3):
        step(ddp, {name: 8 * g for name, g in gradients(SHAPES, rank, i).items()})
    before = _layers(compression)["wide"]
    compression.grad_scale = 0.125
    after = _layers(compression)["wide"]
    for name in ("residual", "gradient"):
        assert after[name] == pytest.approx(before[name] / 8, rel=1e-6)
    for name in ("residual_ratio", "captured"):
        assert after[name] == pytest.approx(before[name], rel=1e-6)
