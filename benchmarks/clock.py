# SPDX-License-Identifier: BSD-3-Clause
"""Time on the CPU, and on a GPU as its own events tell it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# The device sleeps so long that the host has meanwhile launched a whole step: about 10 ms.
AHEAD_CYCLES = 20_000_000


class Clock:
    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """A moment between what was launched before and after."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        if not self._cuda:
            return (end - start) * 1e3
        end.synchronize()
        return start.elapsed_time(end)

    def get_ahead(self) -> None:
        """Lets the host go ahead of the device, as it is while autograd runs backward."""
        if self._cuda:
            torch.cuda._sleep(AHEAD_CYCLES)

    def median(
        self,
        run: Callable[[], None],
        repeats: int,
        before: Callable[[], None] = lambda: None,
        ahead: bool = False,
    ) -> float:
        """The median time of run() in ms, each after an untimed before()."""
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


def profile(run: Callable[[], None]) -> dict[str, float]:
    """How many kernels, copies and fills run() puts on the GPU, and how long it is busy with them.

    Empty where the profiler sees nothing, which is to say, on the CPU.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    on_device = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not on_device:
        return {}
    return {
        "launches": len(on_device),
        "busy_ms": sum(event.time_range.elapsed_us() for event in on_device) / 1e3,
    }


class PeakMemory:
    """The device memory taken since, at its peak. 0 on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def bytes(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before if self._cuda else 0
