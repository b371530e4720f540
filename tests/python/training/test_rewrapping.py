# SPDX-License-Identifier: BSD-3-Clause
"""A module that is wrapped in DDP anew: its residual moves, or a warning says that it is lost."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.ddp import make_compressed, train
from support.ledger import Ledger
from support.log_records import LogRecords
from support.on_ranks import on_ranks
from support.synthetic import SHAPES

OPTIONS: dict[str, Any] = {"start_powerSGD_iter": 2, "matrix_approximation_rank": 1}


def _trained(steps: int = 4, **options: Any) -> tuple[DistributedDataParallel, tp.Compression]:
    ddp, compression = make_compressed(SHAPES, {**OPTIONS, **options})
    train(ddp, range(steps))
    return ddp, compression


def _attach_anew(module: torch.nn.Module) -> tuple[DistributedDataParallel, tp.Compression]:
    new = DistributedDataParallel(module)
    return new, tp.attach(new, OPTIONS)


def replace_the_default_group(rank: int, device: str) -> None:
    ddp, compression = make_compressed(SHAPES, OPTIONS, device=device)
    ledger = Ledger()
    for i in range(6):
        if i == 3:
            dist.destroy_process_group()
            ranks.init_group(f"{device}:powersgd")
            ddp = DistributedDataParallel(ddp.module)
            compression = tp.attach(ddp, previous=compression)
        train(ddp, [i], ledger)
    ledger.check(compression)
    assert compression.stats()["compressed_calls"] == 4


@on_ranks(2)
def test_the_residual_moves_to_another_default_group(rank: int) -> None:
    replace_the_default_group(rank, "cpu")


def _count(records: LogRecords) -> int:
    """The warnings since the last call."""
    said = len(records.matching("Synthetic was wrapped again"))
    records.seen.clear()
    return said


@on_ranks(2)
def test_a_residual_that_is_lost_is_said_once(rank: int) -> None:
    records, speaks = LogRecords(logging.WARNING), int(rank == 0)
    old, _ = _trained()
    new, _ = _attach_anew(old.module)
    assert _count(records) == speaks, "while the old wrapper is there"
    train(new, [0])
    _attach_anew(new.module)
    assert _count(records) == 0, "before the new one compresses"

    old, compression = _trained()
    module = old.module
    del old
    gc.collect()
    assert compression.ended  # the record of the residual does not keep it
    _attach_anew(module)
    assert _count(records) == speaks, "when the old wrapper is gone"

    old, compression = _trained()
    compression.state_dict()
    train(old, [4])
    _attach_anew(old.module)
    assert _count(records) == speaks, "with an old state"


@on_ranks(2)
def test_the_recommended_remedy_works(rank: int) -> None:
    records = LogRecords(logging.WARNING)
    old, compression = _trained()
    module = old.module
    weight = next(module.parameters())
    for change in (
        lambda: None,
        lambda: weight.requires_grad_(False),
        lambda: weight.requires_grad_(True),
        lambda: module.double(),
    ):
        change()
        records.seen.clear()
        new, attached = _attach_anew(module)
        said = records.matching("Synthetic was wrapped again.*?(previous=|state_dict)")
        assert rank > 0 or len(said) == 1
        attached.load_state_dict(compression.state_dict())
        try:
            tp.attach(DistributedDataParallel(module), previous=compression)
            works = "previous="
        except ValueError:
            works = "state_dict"
        assert all(match[1] == works for _, match in said)
        old, compression = _attach_anew(module)
        train(old, range(4))


@on_ranks(2)
def test_where_no_residual_is_lost_nothing_is_said(rank: int) -> None:
    records = LogRecords(logging.WARNING)
    old, compression = _trained()
    state = compression.state_dict()
    _, compression = _attach_anew(old.module)
    compression.load_state_dict(state)
    assert _count(records) == 0, "with the state"

    old, compression = _trained()
    module = old.module
    compression.state_dict(per_rank=True)
    del old
    _attach_anew(module)
    assert _count(records) == 0, "with the state of a wrapper that is gone"

    _attach_anew(_trained(steps=2)[0].module)
    assert _count(records) == 0, "before compression"
    _attach_anew(_trained(use_error_feedback=False)[0].module)
    assert _count(records) == 0, "without error feedback"

    old, compression = _trained()
    compression.detach()
    tp.attach(old)
    assert _count(records) == 0, "the same wrapper, after detach"
    _attach_anew(old.module)
    assert _count(records) == 0, "after detach"
