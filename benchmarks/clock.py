# SPDX-License-Identifier: BSD-3-Clause
"""Clocks: CPU time, and on a GPU the time between two events, of the host, or of the kernels."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

Span = tuple[float, float]

# The device spins for about 10 ms, while the host launches a whole step.
AHEAD_CYCLES = 20_000_000


def device_of(name: str) -> torch.device:
    """The device "cpu" or "cuda"."""
    return torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")


def is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def name_of(device: torch.device) -> str:
    """The name of a GPU. Empty for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


class Clock:
    """Times what runs on one device, in milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """A mark after everything launched so far."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))

    def get_ahead(self) -> None:
        """Lets the host get ahead of the device, as it does in a backward pass."""
        if self._cuda:
            torch.cuda._sleep(AHEAD_CYCLES)

    def median(
        self,
        run: Callable[[], object],
        repeats: int,
        before: Callable[[], None] = lambda: None,
        ahead: bool = False,
    ) -> float:
        """The median time of run(). An untimed before() precedes each run."""
        times = []
        for _ in range(repeats):
            before()
            if self._cuda:
                torch.cuda.synchronize()
            if ahead:
                self.get_ahead()
            start = self.mark()
            run()
            times.append(self.milliseconds(start, self.mark()))
        return statistics.median(times)


def host_ms(run: Callable[[], object], repeats: int, before: Callable[[], None]) -> float:
    """The median time until run() returns to the host, from an idle GPU on."""
    times = []
    for _ in range(repeats):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def gpu_ms(run: Callable[[], object], repeats: int) -> float:
    """The mean time in which the GPU runs the kernels and copies of run(), without the gaps.

    It is 0 if the profiler cannot trace the device.
    """
    # A profiler loses the first kernels that it sees (pytorch#192021), so it warms up.
    turns = schedule(wait=0, warmup=1, active=repeats, repeat=1)
    with profile(activities=[ProfilerActivity.CUDA], schedule=turns) as profiler:
        for _ in range(1 + repeats):
            run()
            torch.cuda.synchronize()
            profiler.step()
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or []
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return covered(spans) / 1e3 / repeats


def covered(spans: Iterable[Span], window: Span = (0.0, math.inf)) -> float:
    """The length of the part of a window that lies in at least one of the spans."""
    length, reached = 0.0, window[0]
    for start, end in sorted(spans):
        length += max(0.0, min(end, window[1]) - max(start, reached))
        reached = max(reached, end)
    return length
