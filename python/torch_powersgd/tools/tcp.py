# SPDX-License-Identifier: BSD-3-Clause
"""What this host's TCP does after a pause, such as the one between two training steps."""

from __future__ import annotations

import math
from pathlib import Path

SETTINGS = Path("/proc/sys/net/ipv4")
INITIAL_WINDOW = 10 * 1448  # bytes in flight at a start (RFC 6928), in segments of Ethernet
EXAMPLE = 200_000  # bytes
REMEDY = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"


def round_trips(size: int) -> int:
    """The round trips that a message of ``size`` bytes takes in slow start.

    The window doubles in each (RFC 5681, section 3.1).
    """
    return max(1, math.ceil(math.log2(size / INITIAL_WINDOW + 1)))


def after_a_pause() -> str:
    """What happens to the window after a pause, and what it costs. Empty where this is not known.

    Linux has ``tcp_slow_start_after_idle`` (RFC 2861): a connection that sent nothing for longer
    than its retransmission timeout starts again with the initial window. Congestion controls that
    set their own rate, such as BBR, don't.
    """
    try:
        control = (SETTINGS / "tcp_congestion_control").read_text().strip()
        restarts = (SETTINGS / "tcp_slow_start_after_idle").read_text().strip() == "1"
    except OSError:
        return ""
    if not restarts or control.startswith("bbr"):
        return f"{control}, the window stays open after a pause"
    return (
        f"{control}, slow start after a pause: a message of {EXAMPLE // 1000} kB then takes "
        f"{round_trips(EXAMPLE)} round trips in place of one. Near links don't show it. Over far "
        f"ones, run {REMEDY} on every host"
    )
