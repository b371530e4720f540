# SPDX-License-Identifier: BSD-3-Clause
"""The output of ``advise``: the verdict, a line to copy, and a table of the measured steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from torch_powersgd.cli.rehearsal import Measured
from torch_powersgd.cli.tables import Table, say
from torch_powersgd.options import Options
from torch_powersgd.units import ms_text, size_text

LEAST_GAIN = 1.05  # times faster than plain; less is not worth a change
HIDDEN = 1.05  # times a step without averaging; the network is hidden in a step that takes less
WAITS = 1.2  # times a step without averaging; a shorter wait is not worth the loss of local steps
EVERY = (5, 10, 20, 30, 50, 100)  # steps between two rounds of local steps
WORTH_OF_RANK = 1.05  # times the fastest step; a higher matrix rank is worth this much

HEADINGS = ("", "step\nms", "quartiles\nms", "sent\nper step", "times faster\nthan plain")
NOISY = 1.3  # times from the lower quartile of a setting's steps to the upper one
LOSS = (
    "A lower matrix rank costs more loss, which this doesn't measure: take a higher one if its "
    'step is fast enough. "shadow" measures the error of each in your training. See "Choose your '
    'settings" in the documentation.'
)
RECOMMENDED = Options()
# Rounds of local steps to compare: an argument of LocalSGD, and the density in it.
ROUNDS = {"": None, ", density=1/16": 1 / 16}
FEW = 8  # processes; among more, each receives too many bytes with a density


def print_advice(
    measured: Sequence[Measured],
    introduction: str,
    sizes: Sequence[Measured] = (),
    rounds: Mapping[str, float] | None = None,
) -> None:
    """Prints the verdict and what to do, what was measured, and the table.

    Args:
        measured: a step without averaging, the plain one, and the settings.
        introduction: says what was measured.
        sizes: the recommended setting with DDP's own buckets, and with others.
        rounds: the seconds of rounds of local steps, by the arguments in ``ROUNDS``.
    """
    chosen, sentences = verdict(measured)
    for sentence in sentences:
        say(sentence)
    if chosen is not None and chosen.options is not None:
        size = best_size(sizes)
        if size is not None:
            say(
                f"With bucket_cap_mb={size.bucket_cap_mb} a step takes {ms_text(size.median)} ms, "
                f"instead of {ms_text(sizes[0].median)} ms with DDP's own buckets."
            )
        for note in (LOSS, noise(chosen)):
            if note:
                print()
                say(note)
        print(f"\n{lines_to_copy(chosen.options, size.bucket_cap_mb if size else None)}")
    print()
    say(introduction)
    print()
    table_of(measured, chosen).print()
    if rounds:
        print()
        say(
            "The step still waits for the network: without averaging it takes "
            f"{ms_text(measured[0].median)} ms. With the arguments below, "
            "torch_powersgd.LocalSGD(ddp, optimizer, ...) hides the wait, but costs more in loss: "
            'see "Slow or far links" in the documentation.'
        )
        print()
        local_steps_table(measured[0].median, rounds).print()


def noise(setting: Measured) -> str:
    """Says that other programs may have disturbed the measurement, or nothing."""
    lower, upper = _quartiles(setting)
    if upper < NOISY * lower:
        return ""
    return (
        f"These times are noisy: half of the steps with {setting.name} took {ms_text(lower)} to "
        f"{ms_text(upper)} ms. If other programs use these machines, run it again without them: "
        "another matrix rank may be faster."
    )


def waits(measured: Sequence[Measured], sizes: Sequence[Measured] = ()) -> bool:
    """Whether the best step that averages waits for the network, so that local steps may pay."""
    alone, *averaging = measured
    best = min(each.median for each in (*averaging, *sizes) if each.rounds)
    return best > WAITS * alone.median


def local_steps_table(alone: float, rounds: Mapping[str, float]) -> Table:
    """How many local steps hide each kind of round, where a step alone takes ``alone`` seconds."""
    rows = []
    for arguments, seconds in rounds.items():
        hidden = (HIDDEN - 1) * alone
        every = next((n for n in EVERY if seconds / n <= hidden), EVERY[-1])
        step = alone + seconds / every
        rows.append((f"sync_every={every}{arguments}", ms_text(seconds), ms_text(step)))
    return Table(("local steps", "round\nms", "step\nms"), rows)


def may_pay(sizes: Sequence[Measured]) -> bool:
    """Whether a size of buckets has been faster than DDP's own in every round so far."""
    return any(_always_faster(sizes[0], each) for each in sizes[1:])


def best_size(sizes: Sequence[Measured]) -> Measured | None:
    """The fastest size of buckets if it pays, as a setting does. None: DDP's own."""
    paying = [each for each in sizes[1:] if _pays(sizes[0], each)]
    return min(paying, key=lambda each: each.median, default=None)


def verdict(measured: Sequence[Measured]) -> tuple[Measured | None, list[str]]:
    """Returns the recommended setting, if any pays, and the verdict in words.

    A setting pays if its steps are shorter than plain's in every round, and by 5 % overall. If
    steps without averaging are not, there is nothing to save, and what a setting saves is noise.

    Args:
        measured: a step without averaging, the plain one, and the settings, as ``measure`` has it.
    """
    alone, plain, *settings = measured
    if _gain(plain, alone) < LEAST_GAIN:
        return None, [
            f"Compression does not pay here: {plain.name} takes hardly any time. A step takes "
            f"{ms_text(plain.median)} ms with it, and {ms_text(alone.median)} ms without averaging."
        ]
    fastest = min(settings, key=lambda each: each.median)
    paying = [each for each in settings if _pays(plain, each)]
    if not paying and _gain(plain, fastest) >= LEAST_GAIN:
        return None, [
            f"Too noisy to tell: with {fastest.name} the typical step is shorter than with "
            f"{plain.name}, but not in every round.",
            "Stop other programs on these machines and run it again.",
        ]
    if not paying:
        return None, [
            f"Compression does not pay here: {plain.name} is just as fast. A step takes "
            f"{ms_text(plain.median)} ms with it, and {ms_text(fastest.median)} ms with "
            f"{fastest.name}, the fastest setting."
        ]
    best = min(each.median for each in paying)
    close = [each for each in paying if each.median <= WORTH_OF_RANK * best]
    chosen = max(close, key=_worth)
    return chosen, [
        f"Compression pays here: with {chosen.name} a step takes {ms_text(chosen.median)} ms "
        f"instead of {ms_text(plain.median)} ms. It is the highest matrix rank whose step is "
        "within 5 % of the fastest."
    ]


def table_of(measured: Sequence[Measured], chosen: Measured | None) -> Table:
    _, plain, *settings = measured
    rows = [
        (
            each.name,
            ms_text(each.median),
            " to ".join(map(ms_text, _quartiles(each))),
            size_text(each.sent_bytes) if each.averages else "",
            f"{_gain(plain, each):.2f}" if each in settings else "",
        )
        for each in measured
    ]
    marked = next((i for i, each in enumerate(measured) if each is chosen), None)
    return Table(HEADINGS, rows, marked=marked)


def lines_to_copy(options: Options, bucket_cap_mb: int | None = None) -> str:
    """The call of ``attach`` that sets these options, with the usual exact steps before them.

    The call of DDP precedes it if the size of its buckets is not the default.
    """
    usual = vars(RECOMMENDED)
    fields = {"matrix_approximation_rank": options.matrix_approximation_rank}
    fields |= {
        name: value
        for name, value in vars(options).items()
        if value != usual[name] and name != "start_powerSGD_iter"
    }
    items = ", ".join(f"{name}={_as_code(value)}" for name, value in fields.items())
    attached = f"torch_powersgd.attach(ddp, {items})"
    if bucket_cap_mb is None:
        return attached
    return f"ddp = DistributedDataParallel(model, bucket_cap_mb={bucket_cap_mb})\n{attached}"


def _gain(plain: Measured, setting: Measured) -> float:
    return plain.median / setting.median


def _pays(plain: Measured, setting: Measured) -> bool:
    return _always_faster(plain, setting) and _gain(plain, setting) >= LEAST_GAIN


def _always_faster(plain: Measured, setting: Measured) -> bool:
    rounds = zip(plain.rounds, setting.rounds, strict=True)
    return all(statistics.median(theirs) > statistics.median(own) for theirs, own in rounds)


def _worth(setting: Measured) -> tuple[int, int]:
    """The order of settings that are about equally fast: by matrix rank, then by precision."""
    assert setting.options is not None
    return setting.options.matrix_approximation_rank, setting.sent_bytes


def _quartiles(setting: Measured) -> tuple[float, float]:
    lower, _, upper = statistics.quantiles(setting.seconds, n=4, method="inclusive")
    return lower, upper


def _as_code(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
