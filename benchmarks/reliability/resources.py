# SPDX-License-Identifier: BSD-3-Clause
"""The memory, threads and files of this process over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import process

# Fewer arenas of malloc, which is read when a process starts: memory that is free in one arena and
# wanted in another looks like a leak.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}

# The step or group, and the bytes, threads, threads for callbacks, and files then.
Sample = list[int]
COUNTS = ("threads", "callback threads", "files")
# The threads that run futures' callbacks. There are as many as callbacks ran at once, and they end
# when they have been idle for 30 s.
_CALLBACKS = "powersgd-then"


def sample(at: int) -> Sample:
    """The resources now, without what Python and malloc would only give back later."""
    memory, threads = process.touched_memory(), process.threads()
    callbacks = threads.count(_CALLBACKS)
    return [at, memory, len(threads) - callbacks, callbacks, len(process.files())]


def summary(samples: Sequence[Sample], warm_up: int) -> dict[str, Any]:
    """The resources after the warm-up.

    Memory is its first and last bytes, and its growth those for each step or group. The counts are
    the least, and the most in each half.
    """
    late = [sample for sample in samples if sample[0] >= warm_up]
    halves = late[: len(late) // 2], late[len(late) // 2 :]
    return {
        "memory": [late[0][1], late[-1][1]],
        "growth": slope(late),
        **{
            name: [min(sample[field] for sample in late)]
            + [max(sample[field] for sample in half) for half in halves]
            for field, name in enumerate(COUNTS, 2)
        },
    }


def slope(samples: Sequence[Sample]) -> float:
    """The growth of memory in bytes for each step or group: the line of least squares."""
    at = [sample[0] for sample in samples]
    held = [sample[1] for sample in samples]
    return statistics.linear_regression(at, held).slope
