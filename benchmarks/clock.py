# SPDX-License-Identifier: BSD-3-Clause
"""Clocks: CPU time, and on a GPU the time between two events."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# The device spins for about 10 ms, while the host launches a whole step.
AHEAD_CYCLES = 20_000_000


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


class PeakMemory:
    """The peak of allocated device memory from now on, in bytes. It is 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before if self._cuda else 0
