# SPDX-License-Identifier: BSD-3-Clause
"""Links that delay, lose and reorder: `python -m launcher.emulated_links LINK NAME NAME [...]`.

The usual tool is tc's netem, a kernel module that many machines lack. This process emulates it with
TAP devices alone. Each pair of NAMEs is the two ends of a link; the process holds both, and writes
each frame from one end to the other after the delay. It makes the devices in its own network
namespace, prints a line, and forwards until its standard input ends. LINK is a `Link` in JSON.

Large TCP segments stay whole (IFF_VNET_HDR and TUNSETOFFLOAD), so there are few frames. A link that
loses or reorders gets frames of the MTU instead, so that one loss is as small as on a real link.

Waking up takes the process about 0.1 ms, so a delay of 0.1 ms becomes 0.2 ms. At 1 Gbit/s it needs
0.23 of a core, at a higher priority than the training processes. Without a rate it carries about
4 Gbit/s. It loses no other frames unless a device's queue is full.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

CONTROL = "/dev/net/tun"
HELD_BACK = 5e-3  # seconds that a reordered frame is late

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 1, 2, 4
_LARGEST_FRAME = 1 << 17  # bytes: above a 64 KiB segment with its headers
_FRAMES_AT_ONCE = 64  # from one device, so that none starves the others
_PRIORITY = 10
_STDIN = 0


@dataclass(frozen=True)
class Link:
    """The faults of links. All except the delay only affect frames sent by the first end of a link.

    So a frame that passes a switch, from one link to another, is affected once.

    Attributes:
        delay: the seconds that every frame takes, in either direction.
        jitter: the maximum of an additional uniform delay in seconds, which keeps the order.
        loss: the probability that a frame is lost.
        reordering: the probability that a frame is `HELD_BACK` seconds late, so others overtake it.
        seed: the seed of the random numbers.
    """

    delay: float = 0
    jitter: float = 0
    loss: float = 0
    reordering: float = 0
    seed: int = 0

    @property
    def whole_segments(self) -> bool:
        """True if large segments can stay whole."""
        return not (self.loss or self.reordering)


def make_tap(name: str, whole_segments: bool = True) -> int:
    """Makes a TAP device, which accepts large segments if `whole_segments` is true.

    Returns its file descriptor.
    """
    tap = os.open(CONTROL, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    offload = _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6 if whole_segments else 0
    fcntl.ioctl(tap, _TUNSETOFFLOAD, offload)
    return tap


class Schedule:
    """The frames in flight, ordered by the time at which each is due."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._random = random.Random(link.seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._serial = itertools.count()  # orders frames that are due at the same time
        self._latest: dict[int, float] = {}  # when the last frame to an end is due

    def add(self, now: float, end: int, frame: bytes, suffers: bool) -> None:
        """Schedules a frame to be written to `end`, unless it is lost."""
        link = self._link
        due = now + link.delay
        if suffers:
            if self._random.random() < link.loss:
                return
            due += self._random.uniform(0, link.jitter)
            due = max(due, self._latest.get(end, 0))
            if self._random.random() < link.reordering:
                due += HELD_BACK
            else:
                self._latest[end] = due
        heapq.heappush(self._waiting, (due, next(self._serial), end, frame))

    def patience(self, now: float) -> float | None:
        """The seconds until a frame is due, or None if there is none."""
        return max(0.0, self._waiting[0][0] - now) if self._waiting else None

    def due(self, now: float) -> Iterator[tuple[int, bytes]]:
        """Removes and yields the frames that are due, each with the end to write it to."""
        while self._waiting and self._waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(self._waiting)
            yield end, frame


def forward(ends: Sequence[int], link: Link) -> None:
    """Forwards frames until standard input ends. Each pair of `ends` is a link."""
    peer = {end: ends[i ^ 1] for i, end in enumerate(ends)}
    first_ends = set(ends[::2])
    schedule = Schedule(link)
    while True:
        patience = schedule.patience(time.monotonic())
        ready = select.select([_STDIN, *ends], [], [], patience)[0]
        if _STDIN in ready:
            return
        for end in ready:
            with suppress(BlockingIOError):
                for _ in range(_FRAMES_AT_ONCE):
                    frame = os.read(end, _LARGEST_FRAME)
                    schedule.add(time.monotonic(), peer[end], frame, end in first_ends)
        for end, frame in schedule.due(time.monotonic()):
            with suppress(OSError):  # an interface that is down accepts nothing
                os.write(end, frame)


def main() -> None:
    link, names = Link(**json.loads(sys.argv[1])), sys.argv[2:]
    with suppress(PermissionError):  # frames must not wait for cores that training uses
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    with open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")
    ends = [make_tap(name, link.whole_segments) for name in names]
    print("made", flush=True)
    forward(ends, link)


if __name__ == "__main__":
    main()
