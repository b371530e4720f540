# SPDX-License-Identifier: BSD-3-Clause
"""What local steps send, as numbers and as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from torch_powersgd.local_steps.rounds import Rounds
from torch_powersgd.option_values import dtype_name
from torch_powersgd.options import rank_text
from torch_powersgd.stats import ratio
from torch_powersgd.units import processes_text, size_text, times_text


def stats_of(rounds: Rounds) -> dict[str, Any]:
    """Returns what ``LocalSGD.stats`` documents."""
    counts = [fragment.attachment.counts() for fragment in rounds.fragments]
    before = rounds.taken * _gradient_bytes(rounds)
    after = rounds.buffers.sent + sum(count["bytes_after"] for count in counts)
    whole = sum(count["compressed_bytes_before"] for count in counts)
    packed = sum(count["compressed_bytes_after"] for count in counts)
    in_rounds = packed + rounds.buffers.sent_in_rounds
    return {
        "steps": rounds.steps,
        "rounds": rounds.rounds,
        "dropped_rounds": rounds.dropped,
        "bytes_before": before,
        "bytes_after": after,
        "ratio": ratio(before, after),
        "round_ratio": rounds.schedule.sync_every * ratio(whole, in_rounds),
    }


def announcement(rounds: Rounds) -> str:
    """Returns what compressed rounds send."""
    if rounds.group.size() == 1:
        return f"{rounds.kind}: the group has only one process, so there is nothing to send"
    every = rounds.schedule.sync_every
    before = every * _gradient_bytes(rounds)
    after = sum(fragment.round_bytes for fragment in rounds.fragments) + rounds.buffers.nbytes
    return (
        f"{rounds.kind}: {every} steps send {size_text(after)} instead of {size_text(before)} "
        f"({times_text(ratio(before, after))} fewer), from step {rounds.schedule.warmup_steps} on, "
        + _setting(rounds)
    )


def text_of(rounds: Rounds, counts: Mapping[str, Any]) -> str:
    """Returns what was sent so far, according to ``stats_of``."""
    every, count = rounds.schedule.sync_every, rounds.schedule.fragments
    dropped = f", {counts['dropped_rounds']} dropped" if counts["dropped_rounds"] else ""
    parts = f", in {count} fragments" if count > 1 else ""
    sent = f"sent {size_text(counts['bytes_after'])}"
    if counts["bytes_before"]:
        before, times = counts["bytes_before"], counts["ratio"]
        where = f"{times_text(counts['round_ratio'])} where compressed"
        sent += f" instead of {size_text(before)} ({times_text(times)} fewer, {where})"
    lines = (
        f"{rounds.kind} over {processes_text(rounds.group.size())}: averages every {every} steps"
        f"{parts}, " + _setting(rounds),
        f"step {counts['steps']}, rounds: {counts['rounds']}{dropped}",
        sent,
    )
    return "\n  ".join(lines)


def _setting(rounds: Rounds) -> str:
    """Says with which density or matrix rank."""
    fragment = rounds.fragments[0]
    if fragment.sparse is not None:
        return f"with {fragment.sparse.described}"
    options = fragment.compression.options
    wire = dtype_name(options.wire_dtype or torch.float32)
    return f"with matrix rank {rank_text(options)} in {wire}"


def _gradient_bytes(rounds: Rounds) -> int:
    return sum(fragment.gradient_bytes for fragment in rounds.fragments)
