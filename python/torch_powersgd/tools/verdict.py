# SPDX-License-Identifier: BSD-3-Clause
"""The statistics of measured steps, and the verdict of ``advise`` on them.

All functions are pure. The samples of a setting come in passes, which lie apart in time: noise
that lasts shows as a difference between passes, so the number of passes counts as the sample size.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torch_powersgd.option_values import dtype_name
from torch_powersgd.options import Options

# The notch of a box plot, which holds the median in 95 of 100 samples: McGill, Tukey and Larsen,
# "Variations of Box Plots", The American Statistician 32 (1978).
NOTCH = 1.57
LEAST_NOISE = 0.01  # a part of the step: smaller differences are not taken for real
LEAST_GAIN = 0.05  # a part of the plain step: a smaller gain is not worth a change
CAUTION = 1.5  # times the noise: the best of several settings may have its gain by luck
UNDECIDED_GAIN = 0.1  # a part of the plain step: a larger gain may not hide in the noise
WORTH_OF_RANK = 0.05  # a part of the fastest step: a higher rank is worth that much time
RECOMMENDED_RANK = Options.recommended().matrix_approximation_rank
# The wires whose rounding costs no loss, by docs/convergence.md, from the fewest bytes on. int4 is
# not among them: at rank 8 it costs loss.
WIRES_WITHOUT_LOSS = ("int8", torch.bfloat16, torch.float16, torch.float32)

Passes = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Timing:
    """The samples of one setting.

    Attributes:
        options: the options of the setting. None stands for the plain all-reduce.
        sent_bytes: the bytes that a step sends.
        multiplications: the multiply-adds of one pass over the gradients.
        passes: seconds of each step, by pass.
        predicted: the seconds are not measured, but those of another wire with a shift.
        error: the error of the compressed gradients in a user's own steps. None: not measured.
    """

    options: Options | None
    sent_bytes: int
    multiplications: int
    passes: Passes
    predicted: bool = False
    error: float | None = None

    @property
    def name(self) -> str:
        return name_of(self.options)


@dataclass(frozen=True)
class Figure:
    """Seconds of a step: the median, the quartiles, and the noise of the median.

    Attributes:
        alike: the figure is that of several ranks, which the measurement cannot order.
    """

    median: float
    lower: float
    upper: float
    noise: float
    alike: bool = False


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        kind: whether a setting pays, none does, or the noise hides the answer.
        fastest: the index of the fastest setting that may be recommended.
        chosen: the index of the recommended setting. None unless ``kind`` is "pays".
        better: the index of a slower setting of rank 16 that pays as well, if the chosen rank is
            lower.
    """

    kind: Literal["pays", "does not pay", "too noisy"]
    fastest: int
    chosen: int | None = None
    better: int | None = None


def name_of(options: Options | None) -> str:
    if options is None:
        return "plain all-reduce"
    return f"rank {options.matrix_approximation_rank}, {dtype_name(wire_of(options))}"


def wire_of(options: Options) -> torch.dtype | str:
    return options.wire_dtype or torch.float32


def eligible_wires(settings: Sequence[Options]) -> list[torch.dtype | str]:
    """The wires that may be recommended: those without loss, or else all that there are."""
    given = list(dict.fromkeys(map(wire_of, settings)))
    return [wire for wire in WIRES_WITHOUT_LOSS if wire in given] or given


def figure_of(passes: Passes, alike: bool = False) -> Figure:
    """The median of all samples, with its quartiles and its noise."""
    samples = [seconds for block in passes for seconds in block]
    if len(samples) < 2:
        raise ValueError(f"a spread needs two samples at least, got {len(samples)}")
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    noise = NOTCH * (upper - lower) / math.sqrt(len(passes))
    return Figure(median, lower, upper, max(noise, LEAST_NOISE * median), alike)


def noise_between(one: Figure, other: Figure) -> float:
    """Seconds below which the difference of two figures is noise."""
    return math.hypot(one.noise, other.noise)


def differ(one: Figure, other: Figure) -> bool:
    return abs(one.median - other.median) > noise_between(one, other)


def figures_of(timings: Sequence[Timing]) -> list[Figure]:
    """The figure of each setting, in the order of physics.

    A higher rank sends more bytes and takes more arithmetic, so its step is not shorter. Where the
    medians say otherwise, they cannot tell the ranks apart: those ranks share one figure, of all of
    their samples (isotonic regression of medians, by pooling adjacent violators).
    """
    figures: dict[int, Figure] = {}
    for chain in _chains(timings):
        blocks: list[list[int]] = []
        for index in chain:
            blocks.append([index])
            while len(blocks) > 1 and _median(timings, blocks[-2]) > _median(timings, blocks[-1]):
                blocks[-2:] = [blocks[-2] + blocks[-1]]
        for block in blocks:
            pooled = figure_of(_pooled(timings, block), alike=len(block) > 1)
            figures.update(dict.fromkeys(block, pooled))
    return [figures[index] for index in range(len(timings))]


def judge(plain: Figure, timings: Sequence[Timing], figures: Sequence[Figure]) -> Verdict:
    """Returns the advice that the figures support.

    It is the highest rank whose step is about as long as the fastest. At that rank it is the wire
    with the fewest bytes. Wires that cost loss have no say where there are others.

    Args:
        plain: the plain all-reduce's figure.
        timings: the settings.
        figures: their figures, as ``figures_of`` gives them.
    """
    wires = eligible_wires([_options(timing) for timing in timings])
    indices = [i for i, timing in enumerate(timings) if wire_of(_options(timing)) in wires]
    fastest = min(indices, key=lambda i: figures[i].median)
    paying = [i for i in indices if _pays(plain, figures[i])]
    if not paying:
        possible = max(
            plain.median - figures[i].median + noise_between(plain, figures[i]) for i in indices
        )
        hidden = possible > UNDECIDED_GAIN * plain.median
        return Verdict("too noisy" if hidden else "does not pay", fastest)
    best = figures[min(paying, key=lambda i: figures[i].median)]
    close = [i for i in paying if figures[i].median <= (1 + WORTH_OF_RANK) * best.median]
    chosen = max(close, key=lambda i: _worth(timings[i]))
    better = None
    if _rank(timings[chosen]) < RECOMMENDED_RANK:
        of_that_rank = [i for i in paying if _rank(timings[i]) == RECOMMENDED_RANK]
        better = max(of_that_rank, key=lambda i: _worth(timings[i]), default=None)
    return Verdict("pays", fastest, chosen, better)


def _pays(plain: Figure, figure: Figure) -> bool:
    gain = plain.median - figure.median
    certain = gain > CAUTION * noise_between(plain, figure)
    return certain and gain > LEAST_GAIN * plain.median


def _options(timing: Timing) -> Options:
    assert timing.options is not None
    return timing.options


def _rank(timing: Timing) -> int:
    return _options(timing).matrix_approximation_rank


def _worth(timing: Timing) -> tuple[int, int]:
    """The order of settings that are about as fast, by their worth in training."""
    return _rank(timing), -timing.sent_bytes


def _chains(timings: Sequence[Timing]) -> list[list[int]]:
    """The indices of settings that differ by rank alone, each costlier than the one before."""
    by_wire: dict[torch.dtype | str, list[int]] = {}
    for index, timing in enumerate(timings):
        by_wire.setdefault(wire_of(_options(timing)), []).append(index)
    chains: list[list[int]] = []
    for members in by_wire.values():
        members.sort(key=lambda i: _rank(timings[i]))
        chains.append(members[:1])
        for before, index in zip(members, members[1:], strict=False):
            # A rank so high that it compresses fewer layers may send more and compute less.
            costlier = (
                timings[index].sent_bytes >= timings[before].sent_bytes
                and timings[index].multiplications >= timings[before].multiplications
            )
            if costlier:
                chains[-1].append(index)
            else:
                chains.append([index])
    return chains


def _pooled(timings: Sequence[Timing], block: list[int]) -> Passes:
    """The samples of several settings; those of one pass stay together."""
    by_pass = zip(*(timings[i].passes for i in block), strict=True)
    return [[seconds for samples in together for seconds in samples] for together in by_pass]


def _median(timings: Sequence[Timing], block: list[int]) -> float:
    return statistics.median(s for samples in _pooled(timings, block) for s in samples)
