# SPDX-License-Identifier: BSD-3-Clause
"""Measures how many messages follow each other in Gloo's collectives, on links with a delay.

The hosts are network namespaces, which need root. The delay is far longer than all else, so that a
small collective's time over the delay is the length of its longest chain of messages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from launcher import hosts, ranks, signals

DELAY_MS = 20.0
REPEATS = 5
_LIMIT_SECONDS = 300


def measure(worlds: Sequence[int]) -> list[dict[str, Any]]:
    """The length of each collective's chain, by the number of ranks."""
    signals.unwind_on_signals()
    hosts.sweep()
    chains = []
    for world in worlds:
        with hosts.Hosts(world, None, DELAY_MS) as cluster:
            what = f"{world} hosts with a delay"
            found = ranks.call(chains_of, cluster, what=what, seconds=_LIMIT_SECONDS)
        chains.append({"world": world, **found[0]})
    return chains


def chains_of(rank: ranks.Rank) -> dict[str, float]:
    world = rank.world
    one, each = torch.zeros(1), torch.zeros(world)
    out, chunks = torch.zeros(world), list(torch.zeros(world).split(1))
    collectives: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(one),
        "all_gather": lambda: dist.all_gather(chunks, one),
        "all_to_all": lambda: dist.all_to_all_single(out, each),
    }
    with rank.group("gloo", _LIMIT_SECONDS):
        return {name: round(_delays(run), 2) for name, run in collectives.items()}


def _delays(collective: Callable[[], object]) -> float:
    """The time of the slowest rank, in delays."""
    times = []
    for _ in range(REPEATS + 1):  # the first one makes connections
        dist.barrier()
        began = time.monotonic()
        collective()
        took = torch.tensor(time.monotonic() - began)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return statistics.median(times[1:]) / (DELAY_MS / 1e3)
