# SPDX-License-Identifier: BSD-3-Clause
"""Rounds of local steps on a GPU: the host doesn't wait where they begin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_powersgd as tp
from support.cuda_ranks import needs_cuda, options_of, run
from support.on_ranks import all_agree
from support.synthetic import gradient
from support.tensors import relative_error

pytestmark = needs_cuda

EVERY = 3
SHAPES = [(200, 130), (7,), (), (1100, 1000), (16, 3, 5, 5)]


def _rounds(rank: int, device: str, dtype: torch.dtype, delay: int, density: float | None) -> None:
    """Rounds with numbers that are finite, and one that is dropped."""
    made = [gradient(shape, i).to(device, dtype) for i, shape in enumerate(SHAPES)]
    model = nn.ParameterList([nn.Parameter(value) for value in made])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = tp.LocalSGD(
        model,
        optimizer,
        EVERY,
        options_of(),
        fragment_sync_delay=delay,
        warmup_steps=0,
        density=density,
    )
    fragment = steps._fragments[0]
    for round_ in range(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():  # without the optimizer, whose steps begin rounds
            for i, parameter in enumerate(model.parameters()):
                parameter.add_(gradient(parameter.shape, i, rank, round_).to(device, dtype))
            if round_ == 2 and rank == 1:
                model[1][3] = torch.nan
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if round_ else "default")  # the first allocates
        steps._rounds.begin([fragment], overlaps=delay > 0)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        steps._rounds.finish(fragment)
        assert all_agree([anchor.tolist() for anchor in fragment.anchors.values()])
        for parameter, start in zip(model.parameters(), before, strict=True):
            assert (relative_error(parameter, start) < 1e-2) is (round_ == 2)
    assert steps.stats()["dropped_rounds"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("density", [None, 1 / 16], ids=["factors", "sparse"])
def test_a_round_begins_without_waiting(
    dtype: torch.dtype, delay: int, density: float | None
) -> None:
    run(_rounds, "cuda", dtype, delay, density)
