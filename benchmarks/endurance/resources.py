# SPDX-License-Identifier: BSD-3-Clause
"""The memory, threads and files of this process over time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Sequence

from local_ranks import anonymous_memory

# Fewer arenas of malloc, which is read when a process starts: memory that is free in one arena and
# wanted in another looks like a leak.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}

Sample = list[int]  # the step or group, and the bytes, threads and files then


def sample(at: int) -> Sample:
    """The resources now, without what Python and malloc would only give back later."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # malloc_trim is glibc's
        ctypes.CDLL(None).malloc_trim(0)
    threads, files = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    return [at, anonymous_memory(), threads, files]


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
