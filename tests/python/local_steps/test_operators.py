# SPDX-License-Identifier: BSD-3-Clause
"""What a round costs a device: how many operators, bytes moved, memory, and waits of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_powersgd as tp
from support.on_ranks import on_ranks
from support.operators import Operators, Waits
from support.synthetic import gradient

OPTIONS = {"matrix_approximation_rank": 2}


def _model(layers: int, dtype: torch.dtype) -> nn.ParameterList:
    shapes = [(200, 130), (7,)] * layers
    made = [gradient(shape, "parameter", i).to(dtype) for i, shape in enumerate(shapes)]
    return nn.ParameterList([nn.Parameter(value) for value in made])


def _record(call: Callable[[], object]) -> tuple[Operators, int]:
    """Returns the operators of a call, and the number of waits."""
    with Waits() as waits, Operators() as operators:
        call()
    return operators, waits.count


class Round:
    """The operators and the waits at the begin and the end of a round, and how many numbers."""

    def __init__(self, model: nn.Module, delay: int = 0, density: float | None = None) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule: dict[str, Any] = {"fragment_sync_delay": delay, "warmup_steps": 0}
        steps = tp.LocalSGD(model, optimizer, 4, OPTIONS, density=density, **schedule)
        fragment = steps._fragments[0]
        steps.sync()
        fragment.kept = 0.5  # as if the steps after it had moved what it left in the residual
        begin, waits_of_begin = _record(lambda: steps._rounds.begin([fragment], overlaps=delay > 0))
        finish, waits_of_finish = _record(lambda: steps._rounds.finish(fragment))
        steps.detach()
        self.begin, self.finish = begin, finish
        self.names, self.waits = (begin.names, finish.names), (waits_of_begin, waits_of_finish)
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.moved = (begin.moved + finish.moved) / self.numel
        self.allocated = begin.allocated / self.numel


# Bytes read and written for each number. At the begin: the residual is computed (16), the anchor is
# copied (8), what is kept of the residual subtracted from it (12), and then the parameter (12); the
# cosine is found (16), and the largest change (4). At the end: the largest mean is found (4), and
# the mean subtracted from the anchor (12), which becomes the parameter (36, with the residual). A
# delay copies the parameter (8) and then adds what has been moved since (24). The factors add some.
@pytest.mark.parametrize(("delay", "moved"), [(0, 120), (2, 152)])
@on_ranks(2)
def test_a_round_has_few_operators_and_waits_once(rank: int, delay: int, moved: int) -> None:
    few, many = (Round(_model(layers, torch.float32), delay) for layers in (2, 20))
    _check_names(few, many)
    assert len(few.begin.names) <= 25, few.begin.names
    assert len(few.finish.names) <= 13, few.finish.names
    assert few.waits == (0, 1)
    assert few.moved == pytest.approx(moved, rel=0.01)
    assert few.allocated == pytest.approx(12 if delay else 8, rel=0.01)
    assert few.finish.allocated == pytest.approx(4 * few.numel, rel=0.01)  # the residual


@on_ranks(2)
def test_a_round_in_bfloat16_has_as_few(rank: int) -> None:
    few, many = (Round(_model(layers, torch.bfloat16)) for layers in (2, 20))
    _check_names(few, many)
    assert few.waits == (0, 1)
    assert few.allocated == pytest.approx(14, rel=0.01)


@on_ranks(2)
def test_a_sparse_round_has_none_for_a_parameter(rank: int) -> None:
    """Its packets are made of all parameters at once."""
    few, many = (Round(_model(layers, torch.float32), density=1 / 16) for layers in (2, 20))
    assert few.waits == many.waits == (0, 1)
    assert [len(names) for names in few.names] == [len(names) for names in many.names]


def _check_names(few: Round, many: Round) -> None:
    """Asserts that there are three operators for each matrix, and none for each parameter."""
    for layers, of in ((2, few), (20, many)):
        assert [names.count("addmm_") for names in of.names] == [layers, layers]
        assert of.begin.names.count("dot") == layers
    assert [{*names} for names in few.names] == [{*names} for names in many.names]
    fewer, more = (sum(map(len, of.names)) for of in (few, many))
    assert more - fewer == 3 * (20 - 2)
