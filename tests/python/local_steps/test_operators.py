# SPDX-License-Identifier: BSD-3-Clause
"""What a round costs a device: how many operators, bytes moved, memory, and waits of the host."""

from __future__ import annotations

from collections.abc import Callable

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

    def __init__(self, model: nn.Module, delay: int = 0) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        steps = tp.LocalSGD(model, optimizer, 4, OPTIONS, fragment_sync_delay=delay, warmup_steps=0)
        fragment = steps._fragments[0]
        begin, waits_of_begin = _record(lambda: steps._rounds.begin([fragment], overlaps=delay > 0))
        finish, waits_of_finish = _record(lambda: steps._rounds.finish(fragment))
        steps.detach()
        self.begin, self.finish = begin, finish
        self.names, self.waits = (begin.names, finish.names), (waits_of_begin, waits_of_finish)
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self.moved = (begin.moved + finish.moved) / self.numel
        self.allocated = begin.allocated / self.numel


# Bytes read and written for each number: the anchor is copied (8) and the parameter subtracted
# (12); the largest change is found (4), and the largest mean (4); the mean is subtracted from the
# anchor (12), which becomes the parameter (8). A delay copies the parameter (8) and then adds what
# has been moved since to the anchor (32 in place of the 8).
@pytest.mark.parametrize(("delay", "moved"), [(0, 48), (2, 80)])
@on_ranks(2)
def test_a_round_has_few_operators_and_waits_once(rank: int, delay: int, moved: int) -> None:
    few, many = (Round(_model(layers, torch.float32), delay) for layers in (2, 20))
    assert few.names == many.names  # none for each parameter
    assert len(few.begin.names) <= 8, few.begin.names
    assert len(few.finish.names) <= 9, few.finish.names
    assert few.waits == (0, 1)
    assert few.moved == pytest.approx(moved, rel=0.01)
    assert few.allocated == pytest.approx(8 if delay else 4, rel=0.01)
    assert few.finish.allocated < 0.01 * few.numel


@on_ranks(2)
def test_a_round_of_large_parameters_moves_less(rank: int) -> None:
    """Their changes need no copy of the anchor."""
    large = Round(nn.ParameterList([torch.zeros(1100, 1000)]))
    assert large.moved == pytest.approx(40, rel=0.01)
    assert large.waits == (0, 1)


@on_ranks(2)
def test_a_round_in_bfloat16_has_as_few(rank: int) -> None:
    few, many = (Round(_model(layers, torch.bfloat16)) for layers in (2, 20))
    assert few.names == many.names
    assert few.waits == (0, 1)
    assert few.allocated == pytest.approx(6, rel=0.01)
