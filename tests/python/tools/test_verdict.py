# SPDX-License-Identifier: BSD-3-Clause
"""The verdict of advise on synthetic samples: noise, ties, the order of ranks."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from torch_powersgd.tools.report import line_to_copy, sentences
from torch_powersgd.tools.verdict import (
    Figure,
    Timing,
    Verdict,
    differ,
    figure_of,
    figures_of,
    judge,
)

RANKS = (4, 8, 16, 32)
WIRES = (torch.bfloat16, torch.float32)
BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16, "int8": 8, "int4": 4}

Seconds = dict[torch.dtype, tuple[float, ...]]  # by wire, of each rank


def _passes(
    seconds: float, spread: float, generator: random.Random, passes: int = 5, steps: int = 3
) -> list[list[float]]:
    return [
        [generator.gauss(seconds, spread * seconds) for _ in range(steps)] for _ in range(passes)
    ]


def _timing(
    rank: int,
    wire: torch.dtype | str | None,
    passes: list[list[float]],
    multiplications: int | None = None,
) -> Timing:
    options = tp.Options(matrix_approximation_rank=rank, wire_dtype=wire)
    sent = 1000 * rank * BITS[wire or torch.float32]
    work = 10_000 * rank if multiplications is None else multiplications
    return Timing(options, sent, work, passes)


def _grid(seconds: Seconds, spread: float, generator: random.Random) -> list[Timing]:
    """Timings of all ranks and wires."""
    return [
        _timing(rank, wire, _passes(seconds[wire][i], spread, generator))
        for wire in WIRES
        for i, rank in enumerate(RANKS)
    ]


def _chosen(verdict: Verdict, timings: list[Timing]) -> Timing:
    assert verdict.chosen is not None
    return timings[verdict.chosen]


def _judged(plain: Figure, timings: list[Timing]) -> Verdict:
    return judge(plain, timings, figures_of(timings))


# Milliseconds of a step of a GPT of 10.9 M parameters on two ranks, without noise.
GIGABIT: Seconds = {torch.bfloat16: (246, 246, 246, 255), torch.float32: (256, 254, 268, 280)}
HUNDRED_MEGABIT: Seconds = {
    torch.bfloat16: (233, 255, 295, 340),
    torch.float32: (280, 310, 392, 500),
}


def test_a_figure_is_median_quartiles_and_noise() -> None:
    figure = figure_of([[1.0, 2.0], [3.0, 4.0], [5.0]])
    assert (figure.lower, figure.median, figure.upper) == (2.0, 3.0, 4.0)
    assert figure.noise == pytest.approx(1.57 * 2.0 / 3**0.5)
    # A clock is not exact: if samples agree by chance, a part of the step remains as noise.
    assert figure_of([[1.0, 1.0]]).noise == pytest.approx(0.01)


def test_noise_that_lasts_counts_by_passes() -> None:
    brief = [[1.0, 1.2], [1.0, 1.2], [1.0, 1.2], [1.0, 1.2]]
    lasting = [[1.0, 1.0, 1.0, 1.0], [1.2, 1.2, 1.2, 1.2]]
    assert figure_of(lasting).noise > figure_of(brief).noise


def test_a_spread_needs_samples() -> None:
    with pytest.raises(ValueError, match="two samples"):
        figure_of([[1.0]])


def test_the_highest_rank_within_5_percent_of_the_fastest_is_recommended() -> None:
    generator = random.Random(0)
    timings = _grid(GIGABIT, 0.002, generator)
    plain = figure_of(_passes(553, 0.002, generator))
    verdict = _judged(plain, timings)
    assert verdict.kind == "pays"
    assert _chosen(verdict, timings).name == "rank 32, bfloat16"
    assert verdict.better is None


def _exactly(seconds: dict[tuple[int, torch.dtype | str], float]) -> list[Timing]:
    """Timings without noise, by rank and wire."""
    return [_timing(rank, wire, [[s, s]] * 4) for (rank, wire), s in seconds.items()]


@pytest.mark.parametrize(("seconds", "rank"), [(1.049, 32), (1.051, 8)])
def test_a_rank_is_worth_5_percent(seconds: float, rank: int) -> None:
    timings = _exactly({(4, "int8"): 1.0, (8, "int8"): 1.02, (32, "int8"): seconds})
    verdict = _judged(figure_of([[2.0, 2.0]] * 4), timings)
    assert _chosen(verdict, timings).name == f"rank {rank}, int8"


def test_a_wire_that_costs_loss_has_no_say() -> None:
    timings = _exactly({(1, "int4"): 0.5, (16, "int4"): 0.6, (4, "int8"): 0.9, (8, "int8"): 1.2})
    verdict = _judged(figure_of([[2.0, 2.0]] * 4), timings)
    assert timings[verdict.fastest].name == "rank 4, int8"
    assert _chosen(verdict, timings).name == "rank 4, int8"
    verdict = _judged(figure_of([[0.8, 0.8]] * 4), timings)
    assert verdict.kind == "does not pay"


def test_a_wire_that_costs_loss_is_recommended_to_those_who_ask_for_it_alone() -> None:
    timings = _exactly({(1, "int4"): 1.0, (16, "int4"): 1.01})
    verdict = _judged(figure_of([[2.0, 2.0]] * 4), timings)
    assert _chosen(verdict, timings).name == "rank 16, int4"


def test_where_low_ranks_are_much_faster_rank_16_is_named_as_well() -> None:
    generator = random.Random(0)
    timings = _grid(HUNDRED_MEGABIT, 0.005, generator)
    verdict = _judged(figure_of(_passes(3900, 0.005, generator)), timings)
    assert _chosen(verdict, timings).name == "rank 4, bfloat16"
    assert verdict.better is not None
    assert timings[verdict.better].name == "rank 16, bfloat16"
    said = " ".join(_sentences(verdict, 3900, 200, timings))
    assert "rank 16, bfloat16 takes 29" in said


def _sentences(
    verdict: Verdict, plain: float, alone: float, timings: list[Timing], noise: float = 5.0
) -> list[str]:
    figure = Figure(plain, plain - noise, plain + noise, noise)
    without = Figure(alone, alone - noise, alone + noise, noise)
    scaled = [
        Figure(f.median / 1e3, f.lower / 1e3, f.upper / 1e3, f.noise / 1e3)
        for f in (figure, without, *figures_of(timings))
    ]
    return sentences(verdict, scaled[0], scaled[1], timings, scaled[2:], "gloo")


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("spread", [0.01, 0.05, 0.3])
def test_nothing_is_recommended_out_of_noise(seed: int, spread: float) -> None:
    """Ranks of one machine: in truth all settings take as long as plain averaging."""
    generator = random.Random(seed)
    same: Seconds = dict.fromkeys(WIRES, (200, 200, 200, 200))
    timings = _grid(same, spread, generator)
    plain = figure_of(_passes(200, spread, generator))
    verdict = _judged(plain, timings)
    assert verdict.kind in ("does not pay", "too noisy")
    assert verdict.chosen is None
    said = " ".join(_sentences(verdict, 200, 195, timings))
    assert "times" not in said.replace("Steps of", "")
    if spread == 0.01:
        assert verdict.kind == "does not pay"
        assert "keep gloo" in said
    if spread == 0.3:
        assert "Too noisy: run again" in said


def test_what_plain_averaging_adds_may_be_less_than_can_be_measured() -> None:
    generator = random.Random(0)
    timings = _grid(dict.fromkeys(WIRES, (230, 240, 250, 260)), 0.01, generator)
    verdict = _judged(figure_of(_passes(200, 0.01, generator)), timings)
    assert verdict.kind == "does not pay"
    assert "less than can be measured" in " ".join(_sentences(verdict, 200, 199, timings))
    assert "less than can be measured" not in " ".join(_sentences(verdict, 200, 150, timings))


def test_noise_does_not_hide_that_all_settings_are_slower() -> None:
    generator = random.Random(1)
    timings = _grid(dict.fromkeys(WIRES, (400, 420, 440, 500)), 0.15, generator)
    verdict = _judged(figure_of(_passes(200, 0.15, generator)), timings)
    assert verdict.kind == "does not pay"


def test_a_large_gain_shows_through_noise() -> None:
    generator = random.Random(1)
    timings = _grid(GIGABIT, 0.15, generator)
    verdict = _judged(figure_of(_passes(900, 0.15, generator)), timings)
    assert verdict.kind == "pays"


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_is_shown_as_faster_than_a_lower_one(seed: int) -> None:
    generator = random.Random(seed)
    timings = _grid(GIGABIT, generator.choice([0.02, 0.1, 0.4]), generator)
    figures = figures_of(timings)
    for begin in (0, len(RANKS)):
        medians = [figure.median for figure in figures[begin : begin + len(RANKS)]]
        assert medians == sorted(medians)
    for figure, timing in zip(figures, timings, strict=True):
        own = figure_of(timing.passes)
        assert figure.alike or figure == own, "what is in order is shown as it was measured"


def test_ranks_that_cannot_be_ordered_share_one_figure() -> None:
    timings = [
        _timing(4, torch.float32, [[1.0, 1.0], [1.0, 1.0]]),
        _timing(8, torch.float32, [[3.0, 3.0], [3.0, 3.0]]),
        _timing(16, torch.float32, [[2.0, 2.0], [2.0, 2.0]]),
    ]
    four, eight, sixteen = figures_of(timings)
    assert not four.alike
    assert four.median == 1.0
    assert eight == sixteen
    assert eight.alike
    assert (eight.lower, eight.median, eight.upper) == (2.0, 2.5, 3.0)


def test_a_rank_that_computes_less_may_be_faster() -> None:
    # The high rank compresses fewer layers.
    passes = {4: [[3.0, 3.0]], 512: [[2.0, 2.0]]}
    timings = [
        _timing(4, None, passes[4], multiplications=1000),
        _timing(512, None, passes[512], multiplications=500),
    ]
    assert [figure.median for figure in figures_of(timings)] == [3.0, 2.0]


def test_wires_are_not_ordered_by_rank() -> None:
    timings = [
        _timing(4, torch.float32, [[3.0, 3.0]]),
        _timing(8, torch.bfloat16, [[2.0, 2.0]]),
        _timing(16, torch.float16, [[1.0, 1.0]]),
    ]
    assert [figure.median for figure in figures_of(timings)] == [3.0, 2.0, 1.0]


def test_a_tie_goes_to_fewer_bytes() -> None:
    fast = [[1.0, 1.0, 1.0]] * 4
    timings = [
        _timing(8, torch.float32, fast),
        _timing(8, "int8", fast),
        _timing(8, torch.bfloat16, fast),
    ]
    verdict = _judged(figure_of([[2.0, 2.0]] * 4), timings)
    assert verdict.chosen == 1


def test_figures_differ_by_more_than_their_noise() -> None:
    one = Figure(1.0, 0.9, 1.1, 0.3)
    assert not differ(one, Figure(1.49, 1.4, 1.6, 0.4))
    assert differ(one, Figure(1.51, 1.4, 1.6, 0.4))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"matrix_approximation_rank": 16, "wire_dtype": "int8"},
            "torch_powersgd.attach(ddp, torch_powersgd.Options.recommended())",
        ),
        (
            {"matrix_approximation_rank": 32, "wire_dtype": torch.bfloat16},
            "torch_powersgd.attach(ddp, torch_powersgd.Options.recommended("
            "matrix_approximation_rank=32, wire_dtype=torch.bfloat16))",
        ),
        ({"matrix_approximation_rank": 4, "wire_dtype": "int4"}, None),
        ({"matrix_approximation_rank": 2, "min_compression_rate": 3.5}, None),
        ({"wire_dtype": "int8", "residual_dtype": torch.bfloat16}, None),
    ],
)
def test_the_line_to_copy_sets_what_was_measured(fields: dict[str, Any], text: str | None) -> None:
    measured = tp.Options(start_powerSGD_iter=0, **fields)
    line = line_to_copy(measured)
    if text:
        assert line == text
    attached: list[tuple[str, tp.Options]] = []

    class Package:
        Options = tp.Options

        @staticmethod
        def attach(module: str, options: tp.Options) -> None:
            attached.append((module, options))

    exec(line, {"torch": torch, "torch_powersgd": Package, "ddp": "the module"})
    ((module, options),) = attached
    assert module == "the module"
    assert options == tp.Options(start_powerSGD_iter=10, **fields)


def test_the_gain_is_one_of_whole_steps() -> None:
    generator = random.Random(0)
    timings = _grid(GIGABIT, 0.01, generator)
    verdict = _judged(figure_of(_passes(553, 0.01, generator)), timings)
    (said,) = _sentences(verdict, 553, 245, timings)
    (gain,) = re.findall(r"([\d.]+) times as fast", said)
    assert float(gain) == pytest.approx(553 / 246, abs=0.1)
