# SPDX-License-Identifier: BSD-3-Clause
"""The memory, threads and files of this process over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import process

# Limits malloc's arenas, because memory that is free in one arena and needed in another looks like
# a leak. malloc reads this when a process starts.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": "1"}

# The number of the step or group, then bytes, threads, callback threads and files.
Sample = list[int]
COUNTS = ("threads", "callback threads", "files")
# The threads that run the callbacks of futures: as many as have run at once. Each ends after 30 s
# without work.
_CALLBACKS = "powersgd-then"


def sample(at: int) -> Sample:
    """The current resources, after Python and malloc have returned what is free."""
    memory, threads = process.touched_memory(), process.threads()
    callbacks = threads.count(_CALLBACKS)
    return [at, memory, len(threads) - callbacks, callbacks, len(process.files())]


def summary(samples: Sequence[Sample], warm_up: int) -> dict[str, Any]:
    """The resources after the warm-up.

    Memory is given as the first and the last number of bytes, and growth as bytes per step or
    group. Counts are given as the minimum, and the maximum of each half.
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
    """The growth of memory in bytes per step or group, by least squares."""
    at = [sample[0] for sample in samples]
    held = [sample[1] for sample in samples]
    return statistics.linear_regression(at, held).slope
