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

    The window doubles in each (RFC 5681, section 3.1). Over a delay of d one way, all but the first
    add 2 d to the time of the message.
    """
    return max(1, math.ceil(math.log2(size / INITIAL_WINDOW + 1)))


def after_a_pause() -> str:
    """What happens to the window after a pause, and what it costs. Empty where this is not known.

    By ``tcp_slow_start_after_idle`` (RFC 2861), Linux halves the window for each retransmission
    timeout in which a connection sends nothing, down to the initial window. Congestion controls
    that set their own rate, such as BBR, are exempt.
    """
    try:
        control = (SETTINGS / "tcp_congestion_control").read_text().strip()
        restarts = (SETTINGS / "tcp_slow_start_after_idle").read_text().strip()
    except OSError:
        return ""
    found = f"tcp_congestion_control={control}, tcp_slow_start_after_idle={restarts}"
    if restarts == "0" or control.startswith("bbr"):
        return f"{found}: the window stays open after a pause"
    return (
        f"{found}: after a pause of a second, a message of {EXAMPLE // 1000} kB takes "
        f"{round_trips(EXAMPLE)} round trips instead of one. Near links don't show it. Over far "
        f"ones, run {REMEDY} on every host, as root; for a container, use docker run --sysctl"
    )
