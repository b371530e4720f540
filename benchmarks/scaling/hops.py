# SPDX-License-Identifier: BSD-3-Clause
"""Measures how many messages follow one another in Gloo's collectives and in this project's steps.

Hosts are network namespaces, which need root. The longest chain of messages is the extra time of a
run with a longer delay, divided by the difference of the delays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from launcher import hosts, ranks, signals
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from scaling.rank import Model, step
from scaling.settings import EXACT_STEPS, options_of

DELAYS_MS = (20.0, 60.0)  # with shorter ones, the CPU time of many hosts dominates
REPEATS = 5
_LIMIT_SECONDS = 300
_AHEAD_SECONDS = 1.0  # longer than an all-reduce takes
# The parameters of a bucket. Both payloads of the second are 80 kB, which takes two rounds of
# messages on four or more ranks.
BUCKETS = {"small": [[128, 128]], "80 kB": [[64, 5120], [20480]]}
COUNTS = (1, 6)  # of buckets


def measure(worlds: Sequence[int]) -> list[dict[str, float]]:
    """The length of each chain, by the number of ranks."""
    signals.unwind_on_signals()
    hosts.sweep()
    chains = []
    for world in worlds:
        base, delayed = (_seconds(world, delay_ms) for delay_ms in DELAYS_MS)
        added = (DELAYS_MS[1] - DELAYS_MS[0]) / 1e3
        found = {name: round((delayed[name] - base[name]) / added, 2) for name in base}
        chains.append({"world": world, **found})
    return chains


def _seconds(world: int, delay_ms: float) -> dict[str, float]:
    # TCP must not delay a payload: the first steps open its window, and reno does not pace.
    with hosts.Hosts(world, None, delay_ms, None, "reno", slow_start_after_idle=0) as cluster:
        found: dict[str, float] = {}
        for part in (collectives, steps):
            what = f"{part.__name__} of {world} hosts with a delay of {delay_ms:g} ms"
            found |= ranks.call(part, cluster, what=what, seconds=_LIMIT_SECONDS)[0]
        return found


def collectives(rank: ranks.Rank) -> dict[str, float]:
    """The seconds of Gloo's collectives."""
    world = rank.world
    one, each = torch.zeros(1), torch.zeros(world)
    out, chunks = torch.zeros(world), list(torch.zeros(world).split(1))
    with rank.group("gloo", _LIMIT_SECONDS):
        return {
            "all-reduce": _timed(lambda: dist.all_reduce(one)),
            "all-gather": _timed(lambda: dist.all_gather(chunks, one)),
            "all-to-all": _timed(lambda: dist.all_to_all_single(out, each)),
        }


def steps(rank: ranks.Rank) -> dict[str, float]:
    """The seconds of compressed steps."""
    with rank.group("cpu:powersgd", _LIMIT_SECONDS):
        return {
            f"step of {count} x {name}": _step(shapes, count)
            for name, shapes in BUCKETS.items()
            for count in COUNTS
        }


def _step(bucket: list[list[int]], count: int) -> float:
    model = Model(bucket * count, torch.float32)
    cap = sum(parameter.nbytes for parameter in model.parameters()) / count / (1 << 20)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
    compression = tp.attach(ddp, options_of("int8"))
    for _ in range(EXACT_STEPS + REPEATS):
        step(ddp)
    compression.reset_stats()
    seconds = _timed(lambda: step(ddp))
    calls = compression.stats(residual_norms=False)["compressed_calls"]
    assert calls == count * (1 + REPEATS), f"{calls} calls for {count} buckets"
    return seconds


def _timed(run: Callable[[], object]) -> float:
    """The time of the slowest rank, when all begin at the same instant."""
    times = []
    for _ in range(1 + REPEATS):  # the first one connects
        began = _latest(time.monotonic()) + _AHEAD_SECONDS
        time.sleep(max(0.0, began - time.monotonic()))
        run()
        times.append(_latest(time.monotonic()) - began)
    return statistics.median(times[1:])


def _latest(moment: float) -> float:
    """The latest time of any rank. All hosts are on one machine, with one clock."""
    latest = torch.tensor(moment, dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    return float(latest)
