# SPDX-License-Identifier: BSD-3-Clause
"""The predicted steps of advise: the pipeline, the bytes on the link, and the measured costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_powersgd as tp
from support import ranks
from torch_powersgd._core import _C
from torch_powersgd.tools.costs import (
    Link,
    StageSeconds,
    bytes_in_ring,
    measure_link,
    measure_stages,
)
from torch_powersgd.tools.prediction import BucketSeconds, Model, shifted, step_seconds

CPU = torch.device("cpu")
LINK = Link(latency=3.0, hop=1.0, per_byte=0.001)
# The first bucket has no matrix that is compressed at rank 4.
LAYOUT = [[[40]], [[300, 200], [7]], [[200, 300]]]


def _ticks(buckets: list[BucketSeconds]) -> int:
    """The end of a step in whole seconds, found by looking at every second."""
    ready, now = 0, 0
    lanes: list[list[list[float]]] = [[], []]  # jobs of each lane: [bucket, seconds left, on link]
    clock_of_p: dict[int, int] = {}
    ends_of_backward = []
    for bucket in buckets:
        ready += int(bucket.backward)
        ends_of_backward.append(ready)
    for i, bucket in enumerate(buckets):
        lanes[0] += [[i, bucket.stages.before, 0], [i, bucket.p, 1]]
        if bucket.q is not None:
            lanes[1] += [[i, bucket.stages.between, 0], [i, bucket.q, 1]]
            lanes[1] += [[i, bucket.stages.after, 0]]
    asked: dict[int, int] = {}
    owner = None
    while any(lanes):
        moved = True
        while moved:  # all that ends or begins in this second
            moved = False
            for lane in (0, 1):
                if not lanes[lane]:
                    continue
                i, left, on_link = lanes[lane][0]
                if lane == 0 and not on_link and ends_of_backward[int(i)] > now:
                    continue
                if lane == 1 and clock_of_p.get(int(i), now + 1) > now:
                    continue
                if on_link:
                    asked.setdefault(lane, now)
                if left == 0 and (not on_link or owner == lane):
                    lanes[lane].pop(0)
                    moved = True
                    if on_link:
                        owner = None
                        del asked[lane]
                        if lane == 0:
                            clock_of_p[int(i)] = now
            if owner is None and asked:
                owner = min(asked, key=lambda lane: (asked[lane], lane))
                moved = True
        for lane in (0, 1):
            if not lanes[lane]:
                continue
            i, left, on_link = lanes[lane][0]
            can_start = (
                ends_of_backward[int(i)] <= now
                if lane == 0
                else clock_of_p.get(int(i), now + 1) <= now
            )
            if can_start and left > 0 and (not on_link or owner == lane):
                lanes[lane][0][1] -= 1
        if any(lanes):
            now += 1
    return now


SECONDS = st.integers(1, 9)
BUCKETS = st.builds(
    BucketSeconds, SECONDS, st.builds(StageSeconds, SECONDS, SECONDS, SECONDS), SECONDS, SECONDS
)


@given(buckets=st.lists(BUCKETS, min_size=1, max_size=6))
def test_the_pipeline_ends_when_a_clock_says_so(buckets: list[BucketSeconds]) -> None:
    assert step_seconds(buckets) == _ticks(buckets)
