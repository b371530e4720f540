# SPDX-License-Identifier: BSD-3-Clause
"""Computes the figures of a setting from its runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from report import quartiles

from cluster.methods import REFERENCES
from cluster.player import Run

NONE = "none"  # Figures give how much longer a step takes than this method's.
LEAST_WINDOW = 10
Figures = dict[str, Any]


def link(setting: Mapping[str, Any]) -> str:
    """Returns the rate of a setting's links, and their delay if they have one."""
    delay = f", {setting['delay_ms']:g} ms" if setting["delay_ms"] else ""
    return f"{setting['rate']}{delay}"


def ranks(setting: Mapping[str, Any]) -> str:
    per_host = setting.get("per_host", 1)
    return f"{setting['ranks']} ranks" + (f", {per_host} per host" if per_host > 1 else "")


def title(setting: Mapping[str, Any]) -> str:
    tcp = f", {setting['congestion_control']}" if "congestion_control" in setting else ""
    return f"{setting['model']}, {ranks(setting)}, {link(setting)}{tcp}"


def window(steps: int) -> int:
    """The number of steps that a loss is averaged over, because a single batch says little."""
    return max(LEAST_WINDOW, steps // 10)


def smoothed(losses: Sequence[float], size: int) -> list[float]:
    """The mean of the last `size` losses, at each step."""
    windows = (losses[max(0, i + 1 - size) : i + 1] for i in range(len(losses)))
    return [statistics.mean(values) for values in windows]


def losses(runs: Sequence[Run], steps: int) -> dict[str, list[float]]:
    """The smoothed loss after each tenth of the steps: by step, a value for each seed."""
    smooth = [smoothed(run.losses, window(steps)) for run in runs]
    every = max(1, steps // 10)
    return {
        str(step): [each[step - 1] for each in smooth if len(each) >= step]
        for step in range(every, steps + 1, every)
    }


def steps_to(loss: float, losses: Sequence[float], size: int) -> int | None:
    """The first step at which the smoothed loss is that low, or None."""
    for i, value in enumerate(smoothed(losses, size)):
        if i + 1 >= size and value <= loss:
            return i + 1
    return None


@dataclass(frozen=True)
class Target:
    """The losses that all methods are timed to: plain's final loss of each seed.

    There is none if plain has trained for too few steps.
    """

    steps: int  # of plain's runs
    losses: Sequence[float]

    def record(self) -> dict[str, Any]:
        """The part of a record that states the target."""
        loss = statistics.median(self.losses) if self.losses else None
        return {"learning_steps": self.steps, "loss": loss}


def target(learned: Mapping[str, Sequence[Run]]) -> Target:
    """The target of the runs of each method, one per seed."""
    plain = learned.get("plain", [])
    lengths = [len(run.losses) for runs in learned.values() for run in runs]
    steps = min((len(run.losses) for run in plain), default=max(lengths, default=0))
    if steps < 4 * LEAST_WINDOW:
        return Target(steps, [])
    size = window(steps)
    return Target(steps, [smoothed(run.losses[:steps], size)[-1] for run in plain])


def catches_up(run: Run, plain: Run, steps: int) -> bool:
    """Whether the run reaches the loss of plain, with the same seed, after `steps` steps."""
    size = window(steps)
    return steps_to(smoothed(plain.losses[:steps], size)[-1], run.losses, size) is not None


def compare(
    rounds: Sequence[Mapping[str, Run]], learned: Mapping[str, Sequence[Run]], target: Target
) -> dict[str, Figures]:
    """The figures of each method.

    Args:
        rounds: the runs of each round, by method; a run without milliseconds has failed.
        learned: longer runs for the loss, one per seed.
        target: the target losses.
    """
    methods = dict.fromkeys(method for turns in rounds for method in turns)
    result = {method: _times(method, rounds) for method in methods}
    plain = result.get("plain", {})
    for method, figures in result.items():
        if method not in REFERENCES and figures.get("tx_bytes_per_step") and plain.get("step_ms"):
            figures["times_fewer_bytes"] = plain["tx_bytes_per_step"] / figures["tx_bytes_per_step"]
        if figures.get("peak_memory_bytes") and plain.get("peak_memory_bytes"):
            beyond = figures["peak_memory_bytes"] - plain["peak_memory_bytes"]
            figures["memory_beyond_plain_in_gradients"] = beyond / figures["gradient_bytes"]
        runs = learned.get(method, [])
        if any(run.losses for run in runs):
            figures.update(_learning(runs, target))
            figures["failures"] += [why for run in runs for why in run.failures]
    for figures in result.values():
        _add_seconds(figures, plain)
    return result


def _times(method: str, rounds: Sequence[Mapping[str, Run]]) -> Figures:
    runs = [turns[method] for turns in rounds if method in turns]
    done = [run for run in runs if run.succeeded]
    figures: Figures = {"failures": [failure for run in runs for failure in run.failures]}
    if not done:
        return figures
    milliseconds = [ms for run in done for ms in run.milliseconds]
    figures["step_ms"] = statistics.median(milliseconds)
    figures["step_ms_quartiles"] = quartiles(milliseconds)
    figures["tx_bytes_per_step"] = statistics.mean(run.tx_bytes_per_step for run in done)
    figures["gradient_bytes"] = done[0].gradient_bytes
    if done[0].payload_bytes:
        figures["payloads"] = figures["tx_bytes_per_step"] / done[0].payload_bytes
    if done[0].peak_memory_bytes:
        figures["peak_memory_bytes"] = max(run.peak_memory_bytes or 0 for run in done)
    # Compare within a round, since a slow phase of the machine affects both.
    above = [
        statistics.median(turns[method].milliseconds) - statistics.median(none.milliseconds)
        for turns in rounds
        if method in turns and turns[method].succeeded
        if (none := turns.get(NONE)) and none.succeeded
    ]
    if above and method != NONE:
        figures["above_none_ms"] = statistics.median(above)
        figures["above_none_ms_quartiles"] = quartiles(above)
    return figures


def _learning(runs: Sequence[Run], target: Target) -> Figures:
    """Returns the final loss, a median over the seeds, and the steps of each seed to the target."""
    size = window(target.steps)
    ends = [smoothed(run.losses[: target.steps], size)[-1] for run in runs if run.losses]
    pairs = zip(target.losses, runs, strict=False)
    steps = [steps_to(loss, run.losses, size) for loss, run in pairs]
    return {"final_loss": statistics.median(ends), **({"steps_to_loss": steps} if steps else {})}


def _add_seconds(figures: Figures, plain: Figures) -> None:
    """Adds the seconds to the target, and the speedup over plain: medians over the seeds."""
    ours, theirs = figures.get("steps_to_loss"), plain.get("steps_to_loss")
    if not ours or "step_ms" not in figures:
        return
    # A run that never reaches the loss counts as slower than any other.
    steps = statistics.median(math.inf if n is None else n for n in ours)
    figures["seconds_to_loss"] = steps * figures["step_ms"] / 1e3 if steps < math.inf else None
    if theirs and "step_ms" in plain:
        pairs = zip(ours, theirs, strict=False)
        ratios = [their / our if our and their else 0.0 for our, their in pairs]
        figures["times_sooner"] = statistics.median(ratios) * plain["step_ms"] / figures["step_ms"]
