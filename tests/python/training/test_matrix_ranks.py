# SPDX-License-Identifier: BSD-3-Clause
"""Parameters with a matrix rank of their own, or none."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support.ddp import make_compressed, train
from support.ledger import Ledger, residuals_of
from support.log_records import LogRecords
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, Synthetic, mean_gradients
from support.tensors import relative_error

RANKS = {"*.conv": 0, "weights.*i*e": 3, "*.wide": 1}  # the first that fits "wide" gives it 3
OPTIONS: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 0}
OWN = {**OPTIONS, "matrix_ranks": RANKS}


@pytest.mark.parametrize("wire", [None, "int8"])
@on_ranks(2)
def test_each_has_its_own(rank: int, wire: str | None) -> None:
    """Also when a checkpoint is loaded with other ranks, which keeps what was not sent."""
    ddp, compression = make_compressed(SHAPES, {**OWN, "wire_dtype": wire})
    layers = compression.attachment.reducer.states.layers()
    ranks = {layer.name.removeprefix("weights."): layer.rank for layer in layers}
    assert ranks == {"conv": 0, "wide": 3, "tall": 2, "bias": 0, "small": 0}
    ledger = Ledger()
    for i, outputs in enumerate(train(ddp, range(6), ledger)):
        assert relative_error(outputs["conv"], mean_gradients(SHAPES, 2, i)["conv"]) < 1e-6
    assert residuals_of(compression).keys() == {"wide", "tall"}
    ledger.check(compression)
    assert "matrix rank 2 (0 for *.conv, 3 for weights.*i*e, 1 for *.wide)" in str(compression)
    state = compression.state_dict()
    others = {**OPTIONS, "matrix_ranks": {"weights.wide": 0}}
    ddp, compression = make_compressed(SHAPES, {**others, "wire_dtype": wire})
    compression.load_state_dict(state)
    train(ddp, range(6, 10), ledger)
    assert residuals_of(compression).keys() == {"conv", "tall"}
    ledger.check(compression)
    assert ledger.errors()["wide"] < 1e-5 < 0.1 < ledger.errors()["conv"]


@on_ranks(2)
def test_a_rank_that_ends_the_compression_of_a_parameter_is_named(rank: int) -> None:
    records = LogRecords(logging.WARNING)
    make_compressed(SHAPES, {**OPTIONS, "matrix_ranks": {"*.wide": 500, "*": 3}})
    named = "'weights.wide' is averaged exactly: at matrix rank 500, which matrix_ranks sets"
    assert len(records.matching("is averaged exactly")) == (rank == 0)
    assert len(records.matching(named)) == (rank == 0)


@on_ranks(2)
def test_local_steps_name_parameters_of_all_fragments(rank: int) -> None:
    model = Synthetic({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = tp.LocalSGD(model, optimizer, 3, OWN, fragments=3)
    found = {
        layer.name: layer.rank
        for fragment in steps._fragments
        for layer in fragment.attachment.reducer.states.layers()
    }
    assert found == {
        "weights.conv": 0,
        "weights.wide": 3,
        "weights.tall": 2,
        "weights.bias": 0,
        "weights.small": 0,
    }
    steps.detach()
    with pytest.raises(ValueError, match=r"matrix_ranks: no trainable parameter .*'\*.head'"):
        tp.LocalSGD(model, optimizer, 3, {"matrix_ranks": {"*.head": 0}}, fragments=3)


@on_ranks(2)
def test_a_pattern_that_fits_nothing_is_an_error(rank: int) -> None:
    message = (
        r"matrix_ranks: no trainable parameter has the name '\*.tal'[.] "
        r"Did you mean weights.tall[?]"
    )
    with pytest.raises(ValueError, match=message):
        make_compressed(SHAPES, {"matrix_ranks": {"*.wide": 2, "*.tal": 0}})
    with pytest.raises(ValueError, match="matrix_ranks.*rank 1"):
        make_compressed(SHAPES, {"matrix_ranks": {"*.tall": rank}})
