# SPDX-License-Identifier: BSD-3-Clause
"""The warning that names layers of which little is sent for long."""

from __future__ import annotations

import dataclasses
import logging

import torch

import torch_powersgd as tp
from support import ranks
from support.log_records import LogRecords
from support.synthetic import Tensors, gradient, make_attached, step

# The largest of 400 x 400 normal numbers' singular values has 1 % of their squared norm.
SHAPES = {"noise": (400, 400), "smooth": (60, 80), "rare": (400, 400)}
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=10, matrix_approximation_rank=1)


def _gradients(rank: int, i: int) -> Tensors:
    mine = {"smooth": torch.outer(torch.arange(1.0, 61), torch.linspace(-1, 1, 80))}
    mine["noise"] = gradient(SHAPES["noise"], rank, i)
    if i % 25 != 24:  # not used in any step that is looked at
        mine["rare"] = gradient(SHAPES["rare"], rank, i)
    return mine


def _warnings(rank: int, approximation: int, steps: int) -> list[str]:
    records = LogRecords(logging.WARNING)
    options = dataclasses.replace(OPTIONS, matrix_approximation_rank=approximation)
    ddp = make_attached(SHAPES, options, find_unused_parameters=True)
    for i in range(steps):
        step(ddp, _gradients(rank, i))
    tp.stats()  # all steps have ended
    step(ddp, _gradients(rank, steps))
    return [message for _, message in records.seen]


def test_one_warning_names_the_layer_and_the_remedy() -> None:
    first, second = ranks.run(2, _warnings, 1, 150)
    assert second == [], "the first rank alone warns"
    assert first == [
        "'weights.noise': each step of the last 100 has sent less than 0.02 of the gradient and "
        "the residual, by squared norms, so that gradients arrive late. A higher "
        "matrix_approximation_rank than 1 sends more"
    ]


def test_no_warning_before_a_hundred_steps_or_where_enough_is_sent() -> None:
    assert ranks.run(2, _warnings, 1, 99) == [[], []]
    assert ranks.run(2, _warnings, 16, 130) == [[], []]
