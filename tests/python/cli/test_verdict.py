# SPDX-License-Identifier: BSD-3-Clause
"""The verdict of advise on measured steps, and its table."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from torch_powersgd.cli import rehearsal
from torch_powersgd.cli.rehearsal import Measured, name_of
from torch_powersgd.cli.verdict import (
    best_size,
    lines_to_copy,
    local_steps_table,
    may_pay,
    print_advice,
    table_of,
    verdict,
    waits,
)

ROUNDS = rehearsal.ROUNDS[0]
NOISE = (0.99, 1.0, 1.01)  # of the steps of a round


def _steps(milliseconds: float, drift: float = 0.0) -> list[list[float]]:
    """Steps of some rounds, during which the machines get slower by a share."""
    rounds = [1 + drift * i / ROUNDS for i in range(ROUNDS)]
    return [[milliseconds / 1e3 * slower * noise for noise in NOISE] for slower in rounds]


def _setting(rank: int, milliseconds: float, wire: str = "int8", sent: int = 0) -> Measured:
    options = tp.Options(matrix_approximation_rank=rank, wire_dtype=wire, start_powerSGD_iter=0)
    sent = sent or 10_000 * rank
    return Measured(name_of(options), options, sent_bytes=sent, rounds=_steps(milliseconds))


def _measured(plain: float, *settings: Measured) -> list[Measured]:
    alone = Measured("no averaging", averages=False, rounds=_steps(50))
    return [alone, Measured("plain gloo", sent_bytes=38_000_000, rounds=_steps(plain)), *settings]


def _chosen(*measured: Measured) -> Measured | None:
    chosen, _ = verdict(measured)
    return chosen


@pytest.mark.parametrize(
    ("milliseconds", "rank"),
    [((100, 100, 100), 32), ((100, 104, 106), 16), ((100, 106, 120), 8), ((104, 100, 104), 32)],
)
def test_the_highest_rank_within_5_percent_of_the_fastest(
    milliseconds: tuple[float, ...], rank: int
) -> None:
    settings = [_setting(*each) for each in zip((8, 16, 32), milliseconds, strict=True)]
    chosen, sentences = verdict(_measured(200, *settings))
    assert chosen is not None
    assert chosen.name == f"matrix rank {rank}, int8"
    assert sentences[0].startswith(f"Compression pays here: with matrix rank {rank}, int8")
    assert "instead of 200 ms" in sentences[0]


def test_of_two_wires_that_are_as_fast_the_more_precise_is_taken() -> None:
    precise = _setting(16, 101, "bfloat16", sent=320_000)
    assert _chosen(*_measured(200, _setting(16, 100), precise)) is precise
    fast = _setting(16, 100)
    slow = _setting(16, 120, "bfloat16", sent=320_000)
    assert _chosen(*_measured(200, fast, slow)) is fast


@pytest.mark.parametrize(("fastest", "does"), [(59, False), (61, True)])
def test_a_step_waits_for_the_network_if_it_takes_a_fifth_longer(
    fastest: float, does: bool
) -> None:
    """A step without averaging takes 50 ms here."""
    assert waits(_measured(200, _setting(16, fastest))) is does


def test_the_fewest_local_steps_that_hide_the_network() -> None:
    """A step of 50 ms hides 2.5 ms. A round that no number of steps hides takes the largest."""
    rounds = {"": 12e-3, ", density=1/16": 100e-3, ", density=1": 90.0}
    assert [row[0] for row in local_steps_table(50e-3, rounds).rows] == [
        "sync_every=5",
        "sync_every=50, density=1/16",
        "sync_every=100, density=1",
    ]


@pytest.mark.parametrize("milliseconds", [97, 100, 300])
def test_plain_is_kept_where_it_is_as_fast(milliseconds: float) -> None:
    chosen, [sentence] = verdict(_measured(100, _setting(16, milliseconds)))
    assert chosen is None
    assert sentence.startswith("Compression does not pay here: plain gloo is just as fast.")
    assert "A step takes 100 ms with it" in sentence


def test_a_gain_that_a_round_contradicts_is_none() -> None:
    setting = _setting(16, 100)
    setting.rounds[2] = [0.3] * 3
    chosen, sentences = verdict(_measured(200, setting))
    assert chosen is None
    assert sentences[0].startswith("Too noisy to tell: with matrix rank 16, int8")


def test_a_drift_that_hits_all_alike_hides_no_gain() -> None:
    alone, plain, setting = _measured(110, _setting(16, 100))
    plain.rounds, setting.rounds = _steps(110, drift=1), _steps(100, drift=1)
    assert _chosen(alone, plain, setting) is setting


def test_nothing_is_recommended_out_of_noise() -> None:
    """Several settings are as fast as plain, of which one is the luckiest."""
    measured = _measured(100, *(_setting(rank, 100) for rank in (4, 8, 16, 32)))
    for seed in range(100):
        noise = random.Random(seed)
        for each in measured:
            each.rounds = [[noise.gauss(0.1, 0.01) for _ in range(5)] for _ in range(ROUNDS)]
        assert _chosen(*measured) is None


def test_nothing_is_saved_where_averaging_takes_no_time() -> None:
    chosen, [sentence] = verdict(_measured(51, _setting(16, 45)))
    assert chosen is None
    assert sentence.startswith("Compression does not pay here: plain gloo takes hardly any time.")
    assert "51.0 ms with it, and 50.0 ms without averaging" in sentence


def test_the_table() -> None:
    measured = _measured(200, _setting(8, 100), _setting(16, 101.5), _setting(32, 150))
    table = table_of(measured, measured[3])
    assert table.rows == [
        ("no averaging", "50.0", "49.5 to 50.5", "", ""),
        ("plain gloo", "200", "198 to 202", "38.0 MB", ""),
        ("matrix rank 8, int8", "100", "99.0 to 101", "80.0 kB", "2.00"),
        ("matrix rank 16, int8", "102", "100 to 103", "160 kB", "1.97"),
        ("matrix rank 32, int8", "150", "148 to 152", "320 kB", "1.33"),
    ]
    assert table.marked == 3


def test_the_line_is_printed_if_a_setting_pays(capsys: pytest.CaptureFixture[str]) -> None:
    print_advice(_measured(200, _setting(16, 100)), "Two processes.")
    verdict_of, table_and_notes = capsys.readouterr().out.split("\nTwo processes.\n")
    assert verdict_of.startswith("Compression pays here")
    what_it_costs, line, _ = verdict_of.partition("\ntorch_powersgd.attach(ddp, ")
    assert line
    assert "A lower matrix rank costs more loss" in what_it_costs
    assert "plain gloo" in table_and_notes
    print_advice(_measured(100, _setting(16, 100)), "Two processes.")
    assert "attach" not in capsys.readouterr().out


def _of_size(cap: int | None, milliseconds: float) -> Measured:
    setting = _setting(16, milliseconds)
    setting.bucket_cap_mb = cap
    return setting


def test_buckets_of_another_size_are_recommended_if_they_pay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    default, small, large = _of_size(None, 100), _of_size(5, 90), _of_size(100, 80)
    assert best_size([default, small, large]) is large
    assert best_size([default, _of_size(5, 97)]) is None
    assert best_size([]) is None
    small.rounds[1] = [0.2] * 3  # a round contradicts
    assert best_size([default, small]) is None
    assert not may_pay([default, small]), "more rounds change nothing"
    assert may_pay([default, small, large])
    print_advice(_measured(200, default), "Two processes.", [default, large])
    said = capsys.readouterr().out
    assert "With bucket_cap_mb=100 a step takes 80.0 ms, instead of 100 ms" in said
    assert "\nddp = DistributedDataParallel(model, bucket_cap_mb=100)\ntorch_powersgd.at" in said


@pytest.mark.parametrize(
    "fields",
    [
        {"matrix_approximation_rank": 16},
        {"matrix_approximation_rank": 32, "wire_dtype": torch.bfloat16},
        {"matrix_approximation_rank": 4, "wire_dtype": "int4", "min_compression_rate": 3.0},
    ],
)
def test_the_line_to_copy_sets_what_was_measured(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = lines_to_copy(tp.Options(**{"wire_dtype": "int8", **fields, "start_powerSGD_iter": 0}))
    assert f"(ddp, matrix_approximation_rank={fields['matrix_approximation_rank']}" in line
    monkeypatch.setattr(tp, "attach", lambda ddp, **options: (ddp, options))
    given = eval(line, {"torch_powersgd": tp, "ddp": "ddp", "torch": torch})
    assert given == ("ddp", fields)


def test_noise_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    setting = _setting(16, 100)
    setting.rounds = [[0.070, 0.081, 0.119]] * ROUNDS
    print_advice(_measured(200, setting), "Two processes.")
    said = " ".join(capsys.readouterr().out.split())
    assert "half of the steps with matrix rank 16, int8 took 70.0 to 119 ms" in said
    print_advice(_measured(200, _setting(16, 100)), "Two processes.")
    assert "noisy" not in capsys.readouterr().out
