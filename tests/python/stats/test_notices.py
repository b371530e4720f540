# SPDX-License-Identifier: BSD-3-Clause
"""The lines that a user sees without configuring logging: at attach, at the end, and in stats."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.ddp import make_compressed, make_ddp, step, train
from support.on_ranks import on_ranks
from support.synthetic import gradients
from torch_powersgd.units import size_text

# Rank 2 compresses the two weights of 128 x 64 and 32 x 144, but no bias and no small weight.
SHAPES = {"weight": (128, 64), "bias": (128,), "conv": (32, 16, 3, 3), "small": (8, 8)}
NUMEL = 128 * 64 + 128 + 32 * 144 + 64
RAW = 128 + 64
SENT = 2 * (128 + 64) + 2 * (32 + 144) + RAW  # without the counts
FACTORS_IN_GROUPS = 64 * 2 * (2 + 1 + 1 + 3)  # groups of 64 elements, for a wire that rounds
ON_ONE_HOST = "all processes run on this host, where plain all-reduce may be just as fast"
ON_UNEQUAL_HOSTS = "hosts have 1 to 2 processes, so each process sends"
OPTIONS: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 4}
FLOAT32 = tp.Options.hook_defaults()  # of the group
NOT_STARTED = "nothing has been compressed in {} steps: compression starts at step {}"


def _heard(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        function(*arguments, **keywords)
    return heard.getvalue()


def _attach_lines(rank: int) -> tuple[str, ...]:
    quiet = _heard(tp.attach, make_ddp(SHAPES), OPTIONS)
    half = _heard(tp.attach, make_ddp(SHAPES), {**OPTIONS, "wire_dtype": torch.bfloat16})
    nothing = _heard(tp.attach, make_ddp(SHAPES), {"matrix_approximation_rank": 600})
    never = _heard(tp.attach, make_ddp(SHAPES), {"scope": "never"})
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        handler = logging.StreamHandler(logs := io.StringIO())
        logging.getLogger("torch_powersgd").addHandler(handler)
        logging.getLogger("torch_powersgd").setLevel(logging.INFO)
        tp.attach(make_ddp(SHAPES), OPTIONS)
    return quiet, half, nothing, never, logs.getvalue(), stderr.getvalue()


def test_attach_says_once_what_it_will_do() -> None:
    first, second = ranks.run(2, _attach_lines, options=FLOAT32)
    quiet, half, nothing, never, logged, stderr = first
    share = 100 * (128 * 64 + 32 * 144) / NUMEL
    expected = (
        f"2 of 4 parameters ({share:.1f} % of the elements) are compressed at matrix rank 2; a "
        f"step sends {size_text(4 * SENT)} instead of {size_text(4 * NUMEL)}, from step 4 on; "
        f"{ON_ONE_HOST}"
    )
    assert quiet == f"torch_powersgd: {expected}\n"
    assert f"sends {size_text(2 * FACTORS_IN_GROUPS + 4 * RAW)} instead of" in half
    assert "no parameter is compressed: with matrix_approximation_rank=600" in nothing
    assert nothing.endswith("Use a matrix rank of at most 21\n")  # 128 * 64 / (128 + 64) / 2
    assert "scope='never' compresses nothing" in never
    assert logged == f"{expected}\n"  # where logging is configured, it is a message like others
    assert stderr == ""
    assert second == ("",) * 6  # one rank speaks


@on_ranks(2)
def test_attach_says_what_is_exact_because_of_its_dtype(rank: int) -> None:
    tensors = {"w": torch.zeros(64, 64), "x": torch.zeros(64, 64, dtype=torch.float64)}
    some = _heard(tp.attach, tensors, OPTIONS)
    all_ = _heard(tp.attach, {"x": tensors["x"]}, OPTIONS)
    large = _heard(tp.attach, tensors, {"matrix_approximation_rank": 600})
    if rank == 0:
        assert "1 of 2 parameters (50.0 % of the elements)" in some
        assert "matrix rank 2; those in float64 are averaged exactly; a step" in some
        assert "no parameter is compressed: gradients in float64 are averaged exactly\n" in all_
        assert "matrix rank of at most 15. Those in float64 are averaged exactly\n" in large


def test_attach_in_a_group_of_one_says_that_nothing_is_sent() -> None:
    ((quiet, *_),) = ranks.run(1, _attach_lines)
    assert "one process" in quiet


@pytest.mark.parametrize(
    ("world_size", "hosts", "expected"),
    [
        (2, "00", ("; a step sends ", f"; {ON_ONE_HOST}\n")),
        (2, "01", ("; a step sends ", "from step 4 on\n")),
        (4, "0110", ("; in a step, each host of 2 processes sends ", "from step 4 on\n")),
        (3, "010", ("; the payload of a step is ", ON_UNEQUAL_HOSTS)),
    ],
)
@on_ranks(backend=None)
def test_attach_says_what_hosts_mean(
    rank: int, world_size: int, hosts: str, expected: tuple[str, ...]
) -> None:
    os.environ["POWERSGD_HOST"] = hosts[rank]
    ranks.init_group("cpu:powersgd")
    said = _heard(tp.attach, make_ddp(SHAPES), OPTIONS)
    assert all((words in said) == (rank == 0) for words in expected)
    assert (ON_ONE_HOST in said) == (rank == 0 and hosts == "00")


@pytest.mark.parametrize(
    ("device", "arguments", "cap", "advised"),
    [
        ("cuda", {}, 20_000, True),
        ("cuda", {}, 25 << 20, False),  # one bucket holds all
        ("cuda", {"bucket_cap_mb": 25}, 20_000, False),  # not by default
        ("cpu", {}, 20_000, False),
    ],
)
@on_ranks()
def test_attach_advises_larger_buckets_on_gpus(
    rank: int, device: str, arguments: dict[str, Any], cap: int, advised: bool
) -> None:
    ddp = make_ddp(SHAPES, **arguments)
    ddp.device_type, ddp.bucket_bytes_cap = device, cap
    said = _heard(tp.attach, ddp, OPTIONS)
    assert said.count("bucket_cap_mb=100") == (advised and rank == 0)


def _short_job(rank: int, attached: bool, steps: int, read: bool) -> tuple[str, str, str]:
    """Trains; returns the lines of stats, of stats again, and of the end of the group."""
    ddp = make_ddp(SHAPES)
    stats: Callable[[], object] = tp.stats
    if attached:
        with contextlib.redirect_stderr(io.StringIO()):
            stats = tp.attach(ddp).stats
    train(ddp, range(steps))
    said = [_heard(stats) if read else "" for _ in range(2)]
    return said[0], said[1], _heard(dist.destroy_process_group)


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("read", [True, False])
def test_a_job_that_ends_before_compression_starts_says_so_once(attached: bool, read: bool) -> None:
    options = tp.Options.hook_defaults(
        matrix_approximation_rank=2, start_powerSGD_iter=40, min_numel=64
    )
    first, second = ranks.run(2, _short_job, attached, 3, read, options=options)
    said = [text.count(NOT_STARTED.format(3, 40)) for text in first]
    assert said == ([1, 0, 0] if read else [0, 0, 1])
    assert second == ("", "", "")  # one rank speaks


def test_stats_say_nothing_if_compression_starts_soon_or_has_started() -> None:
    options = tp.Options.hook_defaults(**OPTIONS, min_numel=64)
    first, _ = ranks.run(2, _short_job, True, 3, True, options=options)
    assert first[:2] == ("", "")
    assert first[2].count(NOT_STARTED.format(3, 4)) == 1
    for attached in (True, False):
        for lines in ranks.run(2, _short_job, attached, 6, True, options=options):
            assert NOT_STARTED[:20] not in "".join(lines)


def _starts(stats: dict[str, Any]) -> tuple[bool, int | None]:
    return stats["compressing"], stats["starts_at"]


@on_ranks()
def test_stats_say_whether_and_when_compression_starts(rank: int) -> None:
    ddp = make_ddp(SHAPES)
    assert _starts(tp.stats()) == (False, 10)
    compression = tp.attach(ddp, OPTIONS)
    for i in range(5):
        assert _starts(compression.stats()) == (i == 4, 4)
        assert _starts(tp.stats()) == (False, 4)
        step(ddp, gradients(SHAPES, rank, i))
    assert _starts(tp.stats()) == (True, 4)
    _never, none = make_compressed(SHAPES, {"matrix_approximation_rank": 600})
    assert _starts(none.stats()) == (False, None)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (18_432, "18.4 kB"), (999_700, "1000 kB")],
)
def test_a_size_has_three_digits_and_no_exponent(size: int, text: str) -> None:
    assert size_text(size) == text
