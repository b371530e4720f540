# SPDX-License-Identifier: BSD-3-Clause
"""A module that is wrapped in DDP anew: a warning if the residual of the old wrapper is lost."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.log_records import LogRecords
from support.synthetic import SHAPES, gradients, make_ddp, step
from torch_powersgd.attach import attachment_of

OPTIONS: dict[str, Any] = {"start_powerSGD_iter": 2}
LOST = "Synthetic was wrapped anew"


def _wrapper_of_a_trained_module(rank: int, steps: int, **options: Any) -> Any:
    ddp = make_ddp(SHAPES)
    tp.attach(ddp, {**OPTIONS, **options})
    for i in range(steps):
        step(ddp, gradients(SHAPES, rank, i))
    return ddp


def _attach_anew(ddp: DistributedDataParallel) -> DistributedDataParallel:
    new = DistributedDataParallel(ddp.module)
    tp.attach(new, OPTIONS)
    return new


def _wrap_anew(rank: int) -> dict[str, int]:
    records = LogRecords(logging.WARNING)
    heard = {}

    def count(case: str) -> None:
        heard[case] = len(records.matching(LOST))
        records.seen.clear()

    old = _wrapper_of_a_trained_module(rank, 4)
    new = _attach_anew(old)
    count("while the old wrapper is there")

    step(new, gradients(SHAPES, rank, 0))
    _attach_anew(new)
    count("before the new one compresses")

    old = _wrapper_of_a_trained_module(rank, 4)
    module, core = old.module, weakref.ref(attachment_of(old).model)
    del old
    gc.collect()
    assert core() is None  # the record of the residual does not keep it
    tp.attach(DistributedDataParallel(module), OPTIONS)
    count("when the old wrapper is gone")

    old = _wrapper_of_a_trained_module(rank, 4)
    state = tp.state_dict(old)
    tp.load_state_dict(_attach_anew(old), state)
    count("with the state")

    old = _wrapper_of_a_trained_module(rank, 4)
    module = old.module
    tp.state_dict(old, per_rank=True)
    del old
    tp.attach(DistributedDataParallel(module), OPTIONS)
    count("with the state of a wrapper that is gone")

    old = _wrapper_of_a_trained_module(rank, 4)
    tp.state_dict(old)
    step(old, gradients(SHAPES, rank, 4))
    _attach_anew(old)
    count("with an old state")

    _attach_anew(_wrapper_of_a_trained_module(rank, 2))
    count("before compression")
    _attach_anew(_wrapper_of_a_trained_module(rank, 4, use_error_feedback=False))
    count("without error feedback")
    old = _wrapper_of_a_trained_module(rank, 4)
    tp.detach(old)
    tp.attach(old)
    count("the same wrapper")
    return heard


def test_a_residual_that_is_lost_is_said_once() -> None:
    lost = {"while the old wrapper is there", "when the old wrapper is gone", "with an old state"}
    first, second = ranks.run(2, _wrap_anew)
    assert first == {case: int(case in lost) for case in first}
    assert not any(second.values())  # one rank speaks
