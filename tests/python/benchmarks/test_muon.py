# SPDX-License-Identifier: BSD-3-Clause
"""The Muon of the benchmarks, next to torch's."""

from __future__ import annotations

import pytest
import torch
from convergence.muon import Muon, MuonAndAdamW
from torch import nn

from support.synthetic import gradient


@pytest.mark.parametrize("shape", [(96, 33), (33, 96), (40, 40)])
def test_muon_moves_as_torchs(shape: tuple[int, int]) -> None:
    start = gradient(shape, "start")
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    torchs = torch.optim.Muon([theirs], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for optimizer, parameter in ((Muon([ours], 0.1), ours), (torchs, theirs)):
        for step in range(5):
            parameter.grad = gradient(shape, f"step {step}")
            optimizer.step()
    # torch's computes in bfloat16, whose unit is 1/128.
    assert (ours - theirs).norm() < (theirs - start).norm() / 50


def test_embeddings_and_output_are_adamws() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 9))
    groups = MuonAndAdamW(model).param_groups
    assert groups[0]["params"] == [model[1].weight]
    assert len(groups[1]["params"]) == 6
