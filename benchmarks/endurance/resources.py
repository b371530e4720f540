# SPDX-License-Identifier: BSD-3-Clause
"""The memory, threads and files of this process over time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Sequence
from pathlib import Path

from local_ranks import anonymous_memory

# Fewer arenas of malloc, which is read when a process starts: memory that is free in one arena and
# wanted in another looks like a leak.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}

# The step or group, and the bytes, threads, threads for callbacks, and files then.
Sample = list[int]
FIELDS = ("memory", "threads", "callback threads", "files")
# The threads that run futures' callbacks. There are as many as callbacks ran at once, and they end
# when they have been idle for 30 s.
_CALLBACKS = "powersgd-then"


def sample(at: int) -> Sample:
    """The resources now, without what Python and malloc would only give back later."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # malloc_trim is glibc's
        ctypes.CDLL(None).malloc_trim(0)
    callbacks = names = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended
            name = (task / "comm").read_text().strip()
            names += 1
            callbacks += name == _CALLBACKS
    return [at, anonymous_memory(), names - callbacks, callbacks, len(os.listdir("/proc/self/fd"))]


def slope(samples: Sequence[Sample]) -> float:
    """The growth of memory in bytes for each step or group: the line of least squares."""
    at = [float(sample[0]) for sample in samples]
    held = [float(sample[1]) for sample in samples]
    mean_at, mean_held = sum(at) / len(at), sum(held) / len(held)
    spread = sum((x - mean_at) ** 2 for x in at)
    products = ((x - mean_at) * (y - mean_held) for x, y in zip(at, held, strict=True))
    return sum(products) / spread


def after(samples: Sequence[Sample], warm_up: int) -> list[Sample]:
    """The samples after the warm-up."""
    return [sample for sample in samples if sample[0] >= warm_up]
