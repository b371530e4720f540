# SPDX-License-Identifier: BSD-3-Clause
"""Links with a delay: `python -m cluster.delayed_links SECONDS NAME NAME [NAME NAME ...]`.

The usual tool for a delay is tc's netem, a kernel module that many machines lack. This process
emulates it with TAP devices only: it holds both ends of every link, two names after one another.
Each frame that an end sends is written to the other end after the delay. Large TCP segments stay
whole (IFF_VNET_HDR and TUNSETOFFLOAD), so the frames are few. The process makes the devices in its
own network namespace, prints a line, and forwards until it is killed.

The process needs about 0.1 ms more to wake up, so a delay of 0.1 ms is 0.2 ms. It needs a share of
a core, 0.23 at 1 Gbit/s, and a priority above the ranks'. Without a rate it carries some 4 Gbit/s.
It loses a frame only where a device's queue is full.
"""

from __future__ import annotations

import collections
import fcntl
import os
import select
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

CONTROL = "/dev/net/tun"

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 1, 2, 4
_LARGEST_FRAME = 1 << 17  # bytes: more than a segment of 64 KiB and its headers
_FRAMES_AT_ONCE = 64  # frames of one device, so that none starves the others
_PRIORITY = 10


def make_tap(name: str) -> int:
    """Makes a TAP device that takes large segments. Returns its file descriptor."""
    tap = os.open(CONTROL, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return tap


def forward(ends: Sequence[int], delay: float) -> None:
    """Passes on every frame after `delay` seconds, forever. Each two descriptors are a link."""
    peer = {end: ends[i ^ 1] for i, end in enumerate(ends)}
    # The delay is the same everywhere, so the frames are due in the order they came in.
    waiting: collections.deque[tuple[float, int, bytes]] = collections.deque()
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], patience)[0]:
            with suppress(BlockingIOError):
                for _ in range(_FRAMES_AT_ONCE):
                    frame = os.read(end, _LARGEST_FRAME)
                    waiting.append((time.monotonic() + delay, peer[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            with suppress(OSError):  # an interface that is down takes nothing
                os.write(end, frame)


def main() -> None:
    from cluster import hosts

    hosts.die_with_parent()
    delay, *names = sys.argv[1:]
    with suppress(PermissionError):  # the ranks keep the cores busy, and a frame must not wait
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    with open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")
    ends = [make_tap(name) for name in names]
    print("made", flush=True)
    forward(ends, float(delay))


if __name__ == "__main__":
    main()
