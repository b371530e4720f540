# SPDX-License-Identifier: BSD-3-Clause
"""The terminal output of ``advise``: a table of the measured steps, the verdict, a line to copy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from torch_powersgd.options import Options
from torch_powersgd.tools.advise import Measured
from torch_powersgd.tools.rehearsal import Report
from torch_powersgd.tools.verdict import (
    RECOMMENDED_RANK,
    Figure,
    Timing,
    Verdict,
    differ,
    figure_of,
    figures_of,
    judge,
    noise_between,
)

PREDICTED = (
    "A predicted step is the measured one of the same rank, with the difference that the bytes of "
    "its wire make on this link."
)
ERRORS = (
    "The error is that of the compressed gradients in your own steps. Three small models lost "
    'little at 0.1 and much at 0.6: see "Convergence" in the documentation.'
)
ACCURACY = (
    'Loss: "Choose your settings" in the documentation says how each rank trains. Compare the '
    "losses of your own model before you rely on a setting."
)


@contextlib.contextmanager
def progress(shown: bool) -> Iterator[Report]:
    """A progress bar on stderr. It shows only on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=False,  # a thread would compute beside the rehearsal
        disable=not (shown and console.is_terminal),
    ) as bar:
        task = bar.add_task("rehearsing steps", total=None)

        def report(done: int, blocks: int) -> None:
            bar.update(task, completed=done, total=blocks, refresh=True)

        yield report


def print_advice(measured: Measured, step_note: str, world: int, inner: str) -> None:
    """Prints the table and what to do.

    Args:
        measured: the measurements.
        step_note: a sentence that says which step was rehearsed.
        world: the number of ranks.
        inner: the plain backend's name.
    """
    console = Console()
    alone, plain = figure_of(measured.alone), figure_of(measured.plain.passes)
    figures = figures_of(measured.timings)
    verdict = judge(plain, measured.timings, figures)
    bandwidth = 8e-9 / measured.link.per_byte

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    say(
        f"{world} ranks, {_mb(measured.plain.sent_bytes)} MB of gradients; a latency of "
        f"{_ms(measured.link.latency)} ms and {bandwidth:.3g} Gbit/s in an all-reduce. {step_note}"
    )
    console.print(_table(measured, alone, plain, figures, verdict))
    if any(figure.alike for figure in figures):
        say("* The measurement cannot order these ranks; they share one figure.")
    if any(timing.predicted for timing in measured.timings):
        say(PREDICTED)
    for sentence in sentences(verdict, plain, alone, measured.timings, figures, inner):
        say(sentence)
    if _has_errors(measured):
        say(ERRORS)
    if verdict.chosen is not None:
        options = measured.timings[verdict.chosen].options
        assert options is not None
        print(f"\n{line_to_copy(options)}\n")
        say(ACCURACY)


def sentences(
    verdict: Verdict,
    plain: Figure,
    alone: Figure,
    timings: Sequence[Timing],
    figures: Sequence[Figure],
    inner: str,
) -> list[str]:
    """The verdict in words."""
    fastest = f"{timings[verdict.fastest].name}, takes {_ms(figures[verdict.fastest].median)} ms"
    if verdict.kind == "too noisy":
        own = [figure_of(timing.passes) for timing in timings]
        spread = max((f.upper - f.lower) / f.median for f in (plain, alone, *own))
        return [
            "Too noisy: run again. The quartiles of one setting's steps lie up to "
            f"{100 * spread:.0f} % apart, so no verdict holds. Stop other programs on these "
            "machines first."
        ]
    if verdict.kind == "does not pay":
        added = plain.median - alone.median
        noise = noise_between(plain, alone)
        hidden = [
            f"Plain averaging adds less than can be measured ({_ms(noise)} ms) to a step, so "
            "there is nothing to gain."
        ]
        return [
            f"Compression does not pay here: keep {inner}. A step takes {_ms(plain.median)} ms "
            f"with it; the fastest setting, {fastest}.",
            *(hidden if added < noise else []),
        ]
    assert verdict.chosen is not None
    figure = figures[verdict.chosen]
    said = [
        f"Compression pays here: with {timings[verdict.chosen].name} a step takes "
        f"{_ms(figure.median)} ms in place of {_ms(plain.median)} ms, "
        f"{plain.median / figure.median:.1f} times as fast as {inner}."
    ]
    if verdict.better is not None:
        slower = f"{timings[verdict.better].name} takes {_ms(figures[verdict.better].median)} ms"
        said.append(
            f"A step with {slower}. Rank {RECOMMENDED_RANK} trains more like plain averaging: "
            "prefer it where the loss matters more than the time of a step."
        )
    return said


def line_to_copy(options: Options) -> str:
    """The call of attach that sets these options, with the exact steps before them."""
    recommended = Options.recommended()
    start = recommended.start_powerSGD_iter
    wanted = vars(dataclasses.replace(options, start_powerSGD_iter=start))
    usual = vars(recommended)
    changed = {name: value for name, value in wanted.items() if value != usual[name]}
    fields = [f"{name}={_as_code(value)}" for name, value in changed.items()]
    return f"torch_powersgd.attach(ddp, torch_powersgd.Options.recommended({', '.join(fields)}))"


def _as_code(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _table(
    measured: Measured, alone: Figure, plain: Figure, figures: Sequence[Figure], verdict: Verdict
) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for heading in (
        "sent\nMB",
        "step\nms",
        "quartiles\nms",
        "averaging\nadds, ms",
        "speed\nx plain",
        *(["error"] if _has_errors(measured) else []),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("no averaging", "0", *_spread(alone), "", "")
    table.add_row(
        "plain all-reduce",
        _mb(measured.plain.sent_bytes),
        *_spread(plain),
        _added(plain, alone),
        "",
    )
    for index, (timing, figure) in enumerate(zip(measured.timings, figures, strict=True)):
        speed = f"{plain.median / figure.median:.2f}" if differ(plain, figure) else "same"
        table.add_row(
            timing.name,
            _mb(timing.sent_bytes),
            *_spread(figure, timing.predicted),
            _added(figure, alone),
            speed,
            *([] if timing.error is None else [f"{timing.error:.2f}"]),
            style="bold" if index == verdict.chosen else None,
        )
    return table


def _has_errors(measured: Measured) -> bool:
    return any(timing.error is not None for timing in measured.timings)


def _spread(figure: Figure, predicted: bool = False) -> tuple[str, str]:
    mark = "*" if figure.alike else " "
    quartiles = "predicted" if predicted else f"{_ms(figure.lower)} to {_ms(figure.upper)}"
    return f"{_ms(figure.median)}{mark}", quartiles


def _added(figure: Figure, alone: Figure) -> str:
    """The measurable time that averaging adds, or else the noise that hides it."""
    if differ(figure, alone) and figure.median > alone.median:
        return _ms(figure.median - alone.median)
    return f"< {_ms(noise_between(figure, alone))}"


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    digits = 0 if milliseconds >= 100 else 1 if milliseconds >= 10 else 2
    return f"{milliseconds:.{digits}f}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}" if size < 1e8 else f"{size / 1e6:.0f}"
