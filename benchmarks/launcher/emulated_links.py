# SPDX-License-Identifier: BSD-3-Clause
"""Links that delay, lose and reorder: `python -m launcher.emulated_links LINK NAME NAME [...]`.

The usual tool is tc's netem, a kernel module that many machines lack. This process emulates it with
TAP devices only: it holds both ends of every link, two names after one another. Each frame that an
end sends is written to the other end after the delay. The process makes the devices in its own
network namespace, prints a line, and forwards until its standard input ends. LINK is a `Link` in
JSON.

Large TCP segments stay whole (IFF_VNET_HDR and TUNSETOFFLOAD), so the frames are few. A link that
loses or reorders gets frames of the MTU instead, so that it loses no more at once than a real one.

The process needs about 0.1 ms more to wake up, so a delay of 0.1 ms is 0.2 ms. It needs a share of
a core, 0.23 at 1 Gbit/s, and a priority above the ranks'. Without a rate it carries some 4 Gbit/s.
Otherwise it loses a frame only where a device's queue is full.
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
HELD_BACK = 5e-3  # seconds by which a frame is late that others overtake

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 1, 2, 4
_LARGEST_FRAME = 1 << 17  # bytes: more than a segment of 64 KiB and its headers
_FRAMES_AT_ONCE = 64  # frames of one device, so that none starves the others
_PRIORITY = 10
_STDIN = 0


@dataclass(frozen=True)
class Link:
    """The faults of links. All but the delay happen to frames from the first end of a link alone.

    So a frame that goes through a switch, from one link to another, suffers them once.

    Attributes:
        delay: the seconds that every frame takes, in either direction.
        jitter: the most seconds that a frame takes besides. They are uniform, and keep the order.
        loss: the probability that a frame is lost.
        reordering: the probability that a frame comes `HELD_BACK` seconds late, after later ones.
        seed: the seed of the random numbers.
    """

    delay: float = 0
    jitter: float = 0
    loss: float = 0
    reordering: float = 0
    seed: int = 0

    @property
    def whole_segments(self) -> bool:
        """True if large segments may stay whole."""
        return not (self.loss or self.reordering)


def make_tap(name: str, whole_segments: bool = True) -> int:
    """Makes a TAP device, which takes large segments if they may stay whole.

    Returns its file descriptor.
    """
    tap = os.open(CONTROL, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    offload = _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6 if whole_segments else 0
    fcntl.ioctl(tap, _TUNSETOFFLOAD, offload)
    return tap


class Schedule:
    """The frames on their way, by the time at which each is due."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._random = random.Random(link.seed)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._serial = itertools.count()  # keeps the order of frames that are due at one time
        self._latest: dict[int, float] = {}  # when the last frame to an end is due

    def add(self, now: float, end: int, frame: bytes, suffers: bool) -> None:
        """Takes a frame that is to be written to `end`, unless it is lost."""
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
        """Takes out the frames that are due, each with the end that it is written to."""
        while self._waiting and self._waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(self._waiting)
            yield end, frame


def forward(ends: Sequence[int], link: Link) -> None:
    """Passes on every frame that is not lost, until standard input ends. Two `ends` are a link."""
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
            with suppress(OSError):  # an interface that is down takes nothing
                os.write(end, frame)


def main() -> None:
    link, names = Link(**json.loads(sys.argv[1])), sys.argv[2:]
    with suppress(PermissionError):  # the ranks keep the cores busy, and a frame must not wait
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    with open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")
    ends = [make_tap(name, link.whole_segments) for name in names]
    print("made", flush=True)
    forward(ends, link)


if __name__ == "__main__":
    main()
