# SPDX-License-Identifier: BSD-3-Clause
"""The texts of local steps: how often they average, and what that sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_powersgd.local_steps.checks import Schedule
from torch_powersgd.local_steps.fragment import Fragment
from torch_powersgd.stats import ratio
from torch_powersgd.units import size_text, times_text


def announcement(
    name: str, size: int, schedule: Schedule, fragments: Sequence[Fragment], buffer_bytes: int
) -> str:
    """Returns what compressed rounds of ``size`` processes send."""
    if size == 1:
        return f"{name}: the group has only one process, so there is nothing to send"
    every = schedule.sync_every
    before = every * sum(fragment.gradient_bytes for fragment in fragments)
    after = sum(fragment.round_bytes for fragment in fragments) + buffer_bytes
    return (
        f"{name}: {every} steps send {size_text(after)} instead of {size_text(before)} "
        f"({times_text(ratio(before, after))} fewer)"
    )


def text_of(name: str, size: int, schedule: Schedule, counts: Mapping[str, Any]) -> str:
    """Returns what was sent so far, according to ``LocalSGD.stats``."""
    dropped = f", {counts['dropped_rounds']} dropped" if counts["dropped_rounds"] else ""
    parts = f", in {schedule.fragments} fragments" if schedule.fragments > 1 else ""
    lines = (
        f"{name} over {size} processes: averages every {schedule.sync_every} steps{parts}",
        f"step {counts['steps']}: {counts['rounds']} rounds{dropped}",
        f"sent {size_text(counts['bytes_after'])} instead of {size_text(counts['bytes_before'])} "
        f"({times_text(counts['ratio'])} fewer, {times_text(counts['round_ratio'])} where "
        "compressed)",
    )
    return "\n  ".join(lines)
