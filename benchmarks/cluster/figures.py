# SPDX-License-Identifier: BSD-3-Clause
"""The figures that the runs of one setting give."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.launch import Run

# Methods that average nothing. A figure says how much longer a step is than theirs.
REFERENCES = {"none": "above_none", "ddp-alone": "above_ddp_alone"}
LEAST_WINDOW = 10
Figures = dict[str, Any]


def link(setting: Mapping[str, Any]) -> str:
    """Returns the rate of a setting's links, and the one-way delay where there is one."""
    delay_ms = setting.get("delay_ms", 0)  # older records have none
    return f"{setting['rate']}, {delay_ms:g} ms" if delay_ms else str(setting["rate"])


def title(setting: Mapping[str, Any]) -> str:
    tcp = f", {setting['congestion_control']}" if "congestion_control" in setting else ""
    return f"{setting['model']}, {setting['ranks']} ranks, {link(setting)}{tcp}"


def window(losses: Sequence[float]) -> int:
    """The number of steps whose mean is a loss, since a single batch says little."""
    return max(LEAST_WINDOW, len(losses) // 10)


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last losses, at each step."""
    size = window(losses)
    windows = (losses[max(0, i + 1 - size) : i + 1] for i in range(len(losses)))
    return [statistics.mean(values) for values in windows]


def steps_to(loss: float, losses: Sequence[float]) -> int | None:
    """The first step at which the smoothed loss is that low. None means that it never is."""
    for i, value in enumerate(smoothed(losses)):
        if i + 1 >= window(losses) and value <= loss:
            return i + 1
    return None


def target_loss(learned: Mapping[str, Sequence[Run]]) -> float | None:
    """Returns the loss of plain averaging after three quarters of its steps: a median."""
    runs = [run for run in learned.get("plain", []) if len(run.losses) >= 4 * LEAST_WINDOW]
    reached = [smoothed(run.losses)[len(run.losses) * 3 // 4 - 1] for run in runs]
    return statistics.median(reached) if reached else None


def learned(record: Mapping[str, Any], model: str, ranks: int) -> dict[str, list[Run]]:
    """Returns the runs, one a seed, that a record has of a model on so many ranks.

    An older record has one run, and not a list of runs.
    """
    runs: dict[str, list[Run]] = {}
    for setting in record["settings"]:
        if (setting["model"], setting["ranks"]) == (model, ranks):
            for name, losses in setting["losses"].items():
                failures = setting["learning_failures"].get(name, [])
                if not losses or not isinstance(losses[0], list):
                    losses, failures = [losses], [failures]
                runs[name] = [
                    Run(why, losses=values) for why, values in zip(failures, losses, strict=True)
                ]
    return runs


def compare(
    rounds: Sequence[Mapping[str, Run]], learned: Mapping[str, Sequence[Run]], loss: float | None
) -> dict[str, Figures]:
    """The figures of each method.

    Args:
        rounds: the runs of each round, by method; one without milliseconds has failed.
        learned: longer runs, one a seed, for the loss.
        loss: to which the time is given.
    """
    methods = dict.fromkeys(method for turns in rounds for method in turns)
    result = {method: _times(method, rounds) for method in methods}
    plain = result.get("plain", {})
    for method, figures in result.items():
        if figures.get("tx_bytes_per_step") and plain.get("tx_bytes_per_step"):
            ratio = plain["tx_bytes_per_step"] / figures["tx_bytes_per_step"]
            figures["times_fewer_bytes"] = ratio if method not in REFERENCES else None
        if figures.get("peak_memory_bytes") and plain.get("peak_memory_bytes"):
            beyond = figures["peak_memory_bytes"] - plain["peak_memory_bytes"]
            figures["memory_beyond_plain_in_gradients"] = beyond / figures["gradient_bytes"]
        if losses := [run.losses for run in learned.get(method, []) if run.losses]:
            figures.update(_learning(losses, loss, figures.get("step_ms")))
    return result


def _learning(losses: Sequence[list[float]], loss: float | None, step_ms: float | None) -> Figures:
    """Returns the figures of a method's runs for the loss: medians over the seeds, and by seed."""
    steps = [steps_to(loss, run) if loss is not None else None for run in losses]
    # A run that never reaches the loss counts as longer than any.
    median = statistics.median(math.inf if number is None else number for number in steps)
    reached = median < math.inf
    figures: Figures = {
        "final_loss": statistics.median(smoothed(run)[-1] for run in losses),
        "steps_to_loss": median if reached else None,
        "steps_to_loss_by_seed": steps,
    }
    if reached and step_ms is not None:
        figures["seconds_to_loss"] = median * step_ms / 1e3
        figures["seconds_to_loss_by_seed"] = [
            None if number is None else number * step_ms / 1e3 for number in steps
        ]
    return figures


def _times(method: str, rounds: Sequence[Mapping[str, Run]]) -> Figures:
    runs = [turns[method] for turns in rounds if method in turns]
    done = [run for run in runs if run.succeeded]
    figures: Figures = {"failures": [failure for run in runs for failure in run.failures]}
    if not done:
        return figures
    milliseconds = [ms for run in done for ms in run.milliseconds]
    figures["milliseconds"] = [[round(ms, 2) for ms in run.milliseconds] for run in done]
    figures["step_ms"] = statistics.median(milliseconds)
    figures["tx_bytes_per_step"] = statistics.mean(run.tx_bytes_per_step for run in done)
    figures["gradient_bytes"] = done[0].gradient_bytes
    if done[0].peak_memory_bytes:
        figures["peak_memory_bytes"] = max(run.peak_memory_bytes or 0 for run in done)
    for reference, name in REFERENCES.items():
        # Rounds are compared pairwise, since a slow phase of the machine slows both down.
        above = [
            statistics.median(turns[method].milliseconds) - statistics.median(base.milliseconds)
            for turns in rounds
            if method in turns and turns[method].succeeded
            if (base := turns.get(reference)) and base.succeeded
        ]
        if above and method != reference:
            figures[f"{name}_ms"] = statistics.median(above)
            figures[f"{name}_by_round_ms"] = above
    return figures
