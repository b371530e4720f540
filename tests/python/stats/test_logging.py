# SPDX-License-Identifier: BSD-3-Clause
"""The messages of the logger "torch_powersgd", and how often they come."""

from __future__ import annotations

import logging
import re
import threading

import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.backward import reduce_in_backward
from support.ddp import make_attached, make_ddp, step, train
from support.log_records import LogRecords
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, gradient

STARTS = r"compression starts at step (\d+)"
STATISTICS = r"(\d+) steps \((\d+) skipped\).*ratio ([\d.]+)"

# Shapes of which little is sent, and one of which all is. The largest of 400 x 400 normal numbers'
# singular values has 1 % of their squared norm.
LOW = {"noise": (400, 400), "smooth": (60, 80), "rare": (400, 400)}


@on_ranks(options=tp.Options.hook_defaults(start_powerSGD_iter=3, matrix_approximation_rank=2))
def test_the_configuration_once_when_compression_starts(rank: int) -> None:
    records = LogRecords()
    ddp = make_attached(SHAPES)
    records.seen.clear()  # the messages of attach
    train(ddp, range(3))
    assert records.seen == []
    train(ddp, range(5))
    ((level, match),) = records.matching(STARTS)
    assert (level, match[1]) == ("INFO", "3")
    message = match.string
    numel, sent = 16 * 75 + 12 * 41 + 50 * 9 + 16 + 12, 2 * (91 + 53 + 59) + 16 + 12 + 3 + 1
    for part in ("rank 2", "3 of 5", str(numel), str(sent), "error feedback on", "warm start on"):
        assert part in message
    assert len(records.seen) == 1
    assert records.threads == {threading.get_ident()}


@on_ranks(
    options=tp.Options.hook_defaults(start_powerSGD_iter=0, compression_stats_logging_frequency=4)
)
def test_statistics_every_n_steps(rank: int) -> None:
    records = LogRecords()
    ddp = make_attached(SHAPES)
    train(ddp, range(11))
    found = records.matching(STATISTICS)
    assert [(level, match[1], match[2]) for level, match in found] == [
        ("INFO", "4", "0"),
        ("INFO", "8", "0"),
    ]
    assert all(float(match[3]) > 1 for _, match in found)


@on_ranks(options=tp.Options.hook_defaults(start_powerSGD_iter=4, min_numel=4096))
def test_the_advice_to_attach_once(rank: int) -> None:
    records = LogRecords()
    for i in range(4):
        reduce_in_backward([gradient([5000], rank, i, k) for k in range(2)])
    assert records.seen == []
    for i in range(6):
        reduce_in_backward([gradient([5000], rank, i, k) for k in range(2)])
    found = records.matching(r"torch_powersgd\.attach\(ddp\)")
    if rank > 0:
        assert found == []
        return
    ((level, match),) = found
    assert level == "WARNING"
    assert re.findall(STARTS, match.string) == ["4"]
    assert "5000" in match.string
    assert len(records.seen) == 1
    assert records.threads == {threading.get_ident()}


@on_ranks(options=tp.Options.hook_defaults(start_powerSGD_iter=0))
def test_no_advice_where_there_is_nothing_to_attach(rank: int) -> None:
    ddp = make_attached(SHAPES)
    records = LogRecords()
    train(ddp, range(3))
    with tp.scope("always"):  # the caller asked for compression, so this is no unattached module
        dist.all_reduce(gradient([64, 64], rank))
    assert records.matching("attach") == []


@on_ranks(options=tp.Options.hook_defaults(scope="never", start_powerSGD_iter=0))
def test_silence_when_nothing_is_compressed(rank: int) -> None:
    records = LogRecords()
    ddp = make_ddp(SHAPES)
    train(ddp, range(3))
    assert records.seen == []


def _low_capture_warnings(rank: int, approximation: int, steps: int) -> list[str]:
    records = LogRecords(logging.WARNING)
    options = {"matrix_approximation_rank": approximation, "start_powerSGD_iter": 10}
    ddp = make_attached(LOW, tp.Options.hook_defaults(**options), find_unused_parameters=True)
    for i in range(steps + 1):
        mine = {"smooth": torch.outer(torch.arange(1.0, 61), torch.linspace(-1, 1, 80))}
        mine["noise"] = gradient(LOW["noise"], rank, i)
        if i % 25 != 24:  # not used in any step that is looked at
            mine["rare"] = gradient(LOW["rare"], rank, i)
        tp.stats()  # all steps have ended
        step(ddp, mine)
    return [message for _, message in records.seen]


def test_one_warning_names_the_layer_of_which_little_is_sent_and_the_remedy() -> None:
    first, second = ranks.run(2, _low_capture_warnings, 1, 150)
    assert second == [], "the first rank alone warns"
    assert first == [
        "'weights.noise': each of the last 100 steps sent less than 0.02 of the gradient plus "
        "residual (squared norms), so gradients arrive late. A higher matrix_approximation_rank "
        "sends more, or higher matrix_ranks of these"
    ]


def test_no_warning_before_a_hundred_steps_or_where_enough_is_sent() -> None:
    assert ranks.run(2, _low_capture_warnings, 1, 99) == [[], []]
    assert ranks.run(2, _low_capture_warnings, 16, 130) == [[], []]
