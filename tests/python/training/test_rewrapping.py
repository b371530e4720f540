# SPDX-License-Identifier: BSD-3-Clause
"""A module that is wrapped in DDP anew: a warning if the residual of the old wrapper is lost."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.log_records import LogRecords
from support.synthetic import SHAPES, gradients, make_compressed, step

OPTIONS: dict[str, Any] = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1}
LOST = "Synthetic was wrapped anew"


def _trained(
    rank: int, steps: int, **options: Any
) -> tuple[DistributedDataParallel, tp.Compression]:
    ddp, compression = make_compressed(SHAPES, {**OPTIONS, **options})
    for i in range(steps):
        step(ddp, gradients(SHAPES, rank, i))
    return ddp, compression


def _attach_anew(module: torch.nn.Module) -> tuple[DistributedDataParallel, tp.Compression]:
    new = DistributedDataParallel(module)
    return new, tp.attach(new, OPTIONS)


def _wrap_anew(rank: int) -> dict[str, int]:
    records = LogRecords(logging.WARNING)
    heard = {}

    def count(case: str) -> None:
        heard[case] = len(records.matching(LOST))
        records.seen.clear()

    old, _ = _trained(rank, 4)
    new, _ = _attach_anew(old.module)
    count("while the old wrapper is there")

    step(new, gradients(SHAPES, rank, 0))
    _attach_anew(new.module)
    count("before the new one compresses")

    old, compression = _trained(rank, 4)
    module = old.module
    del old
    gc.collect()
    assert compression.ended  # the record of the residual does not keep it
    _attach_anew(module)
    count("when the old wrapper is gone")

    old, compression = _trained(rank, 4)
    state = compression.state_dict()
    _, compression = _attach_anew(old.module)
    compression.load_state_dict(state)
    count("with the state")

    old, compression = _trained(rank, 4)
    module = old.module
    compression.state_dict(per_rank=True)
    del old
    _attach_anew(module)
    count("with the state of a wrapper that is gone")

    old, compression = _trained(rank, 4)
    compression.state_dict()
    step(old, gradients(SHAPES, rank, 4))
    _attach_anew(old.module)
    count("with an old state")

    _attach_anew(_trained(rank, 2)[0].module)
    count("before compression")
    _attach_anew(_trained(rank, 4, use_error_feedback=False)[0].module)
    count("without error feedback")
    old, compression = _trained(rank, 4)
    compression.detach()
    _attach_anew(old.module)
    count("after detach")
    old, compression = _trained(rank, 4)
    compression.detach()
    tp.attach(old)
    count("the same wrapper")
    return heard


def test_a_residual_that_is_lost_is_said_once() -> None:
    lost = {"while the old wrapper is there", "when the old wrapper is gone", "with an old state"}
    first, second = ranks.run(2, _wrap_anew)
    assert first == {case: int(case in lost) for case in first}
    assert not any(second.values())  # one rank speaks
