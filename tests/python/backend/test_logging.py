# SPDX-License-Identifier: BSD-3-Clause
"""The messages of the logger "torch_powersgd", and how often they come."""

from __future__ import annotations

import re
import threading

import pytest
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.log_records import LogRecords
from support.synthetic import (
    SHAPES,
    gradient,
    gradients,
    make_attached,
    make_ddp,
    reduce_in_backward,
    step,
)

STARTS = r"compression starts at step (\d+)"
STATISTICS = r"(\d+) steps \((\d+) skipped\).*ratio ([\d.]+)"
DROPPED = r"dropped the state of (\d+)"


def _attached(rank: int) -> None:
    records = LogRecords()
    ddp = make_attached(SHAPES)
    records.seen.clear()  # the messages of attach
    for i in range(3):
        step(ddp, gradients(SHAPES, rank, i))
    assert records.seen == []
    for i in range(5):
        step(ddp, gradients(SHAPES, rank, i))
    ((level, match),) = records.matching(STARTS)
    assert (level, match[1]) == ("INFO", "3")
    message = match.string
    numel, sent = 16 * 75 + 12 * 41 + 50 * 9 + 16 + 12, 2 * (91 + 53 + 59) + 16 + 12 + 3 + 1
    for part in ("rank 2", "3 of 5", str(numel), str(sent), "error feedback on", "warm start on"):
        assert part in message
    assert len(records.seen) == 1
    assert records.threads == {threading.get_ident()}


def test_the_configuration_once_when_compression_starts() -> None:
    options = tp.Options.hook_defaults(start_powerSGD_iter=3, matrix_approximation_rank=2)
    ranks.run(2, _attached, options=options)


def _statistics(rank: int, attached: bool) -> None:
    records = LogRecords()
    ddp = make_attached(SHAPES) if attached else make_ddp(SHAPES)
    for i in range(11):
        step(ddp, gradients(SHAPES, rank, i))
    found = records.matching(STATISTICS)
    assert [(level, match[1], match[2]) for level, match in found] == [
        ("INFO", "4", "0"),
        ("INFO", "8", "0"),
    ]
    assert all(float(match[3]) > 1 for _, match in found)


@pytest.mark.parametrize("attached", [True, False], ids=["attached", "flat"])
def test_statistics_every_n_steps(attached: bool) -> None:
    options = tp.Options.hook_defaults(
        start_powerSGD_iter=0, min_numel=64, compression_stats_logging_frequency=4
    )
    ranks.run(2, _statistics, attached, options=options)


def _flat(rank: int) -> None:
    records = LogRecords()
    for i in range(4):
        reduce_in_backward([gradient([5000], rank, i, k) for k in range(2)])
    assert records.seen == []
    for i in range(6):
        reduce_in_backward([gradient([5000], rank, i, k) for k in range(2)])
    ((level, match),) = records.matching(r"torch_powersgd\.attach\(ddp\)")
    assert level == "WARNING"
    assert re.findall(STARTS, match.string) == ["4"]
    assert "5000" in match.string
    assert len(records.seen) == 1
    assert records.threads == {threading.get_ident()}


def test_the_advice_to_attach_once() -> None:
    ranks.run(2, _flat, options=tp.Options.hook_defaults(start_powerSGD_iter=4, min_numel=4096))


def _no_advice(rank: int) -> None:
    ddp = make_attached(SHAPES)
    records = LogRecords()
    for i in range(3):
        step(ddp, gradients(SHAPES, rank, i))
    with tp.scope("always"):  # the caller asked for compression, so this is no unattached module
        dist.all_reduce(gradient([64, 64], rank))
    assert records.matching("attach") == []


def test_no_advice_where_there_is_nothing_to_attach() -> None:
    ranks.run(2, _no_advice, options=tp.Options.hook_defaults(start_powerSGD_iter=0))


def _layout_change(rank: int) -> None:
    records = LogRecords()
    old = [gradient([5000], rank), gradient([6000], rank), gradient([5000], rank, 2)]
    for _ in range(3):
        reduce_in_backward(old)
    # The first tensor stays and the rest of the layout changes: two states are not used any more.
    new = [gradient([5000], rank), gradient([7000], rank)]
    for _ in range(100):
        reduce_in_backward(new)
    assert records.matching(DROPPED) == []
    reduce_in_backward(new)
    ((level, match),) = records.matching(DROPPED)
    assert (level, match[1]) == ("INFO", "2")
    for _ in range(105):
        reduce_in_backward(new)
    assert len(records.matching(DROPPED)) == 1
    # A layout that comes back starts anew.
    reduce_in_backward(old)


def test_dropped_state() -> None:
    ranks.run(
        2, _layout_change, options=tp.Options.hook_defaults(start_powerSGD_iter=0, min_numel=4096)
    )


def _nothing(rank: int) -> None:
    records = LogRecords()
    ddp = make_ddp(SHAPES)
    for i in range(3):
        step(ddp, gradients(SHAPES, rank, i))
    assert records.seen == []


def test_silence_when_nothing_is_compressed() -> None:
    ranks.run(2, _nothing, options=tp.Options.hook_defaults(scope="never", start_powerSGD_iter=0))
