# SPDX-License-Identifier: BSD-3-Clause
"""The predicted steps of advise: the pipeline, the bytes on the link, and the measured costs."""

from __future__ import annotations

import itertools

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
LINK = Link(latency=3.0, gather=1.0, scatter=0.25, per_byte=0.001)
# The first bucket has no matrix that is compressed at rank 4.
LAYOUT = [[[40]], [[300, 200], [7]], [[200, 300]]]


class _Channel:
    """A channel that works on one bucket after the other, second by second."""

    def __init__(self, jobs: list[tuple[int, float, float, float]]) -> None:
        self.jobs = jobs  # the bucket, and seconds before, on and after the link
        self.began = self.on_link = -1.0
        self.ended: dict[int, float] = {}  # when the link has served a bucket

    def look(self, now: float, may_begin: float) -> bool:
        """True if the channel waits for the link. It begins a bucket at ``may_begin``."""
        if not self.jobs or self.on_link >= 0:
            return False
        if self.began < 0:
            if now < may_begin:
                return False
            self.began = now
        return now >= self.began + self.jobs[0][1]

    def leave_link(self, now: float) -> bool:
        """True if the link has just served it."""
        if self.on_link < 0 or self.jobs[0][0] in self.ended:
            return False
        if now < self.on_link + self.jobs[0][2]:
            return False
        self.ended[self.jobs[0][0]] = now
        return True

    def go_on(self, now: float) -> None:
        """Ends the bucket in hand when all is done."""
        if self.jobs and self.ended.get(self.jobs[0][0], now + 1) + self.jobs[0][3] <= now:
            self.jobs.pop(0)
            self.began = self.on_link = -1.0


def _by_clock(buckets: list[BucketSeconds]) -> float:
    """The end of a step in whole seconds, found by looking at every second."""
    gradients = list(itertools.accumulate(bucket.backward for bucket in buckets))
    stages = [bucket.stages for bucket in buckets]
    first = _Channel([(i, stages[i].before, b.p, 0.0) for i, b in enumerate(buckets)])
    second = _Channel(
        [(i, stages[i].between, b.q or 0.0, stages[i].after) for i, b in enumerate(buckets)]
    )
    busy, queue = False, list[_Channel]()
    for now in range(1000):
        for channel in (first, second):
            if channel.leave_link(now):
                busy = False
            channel.go_on(now)
        if not second.jobs:
            return now
        for channel in (first, second):
            next_bucket = channel.jobs[0][0] if channel.jobs else 0
            begins = (
                gradients[next_bucket] if channel is first else first.ended.get(next_bucket, 1e9)
            )
            if channel.look(now, begins) and channel not in queue:
                queue.append(channel)
        if queue and not busy:
            queue.pop(0).on_link = now
            busy = True
    raise AssertionError("the step does not end")


SECONDS = st.integers(1, 9)
BUCKETS = st.builds(
    BucketSeconds, SECONDS, st.builds(StageSeconds, SECONDS, SECONDS, SECONDS), SECONDS, SECONDS
)


@given(buckets=st.lists(BUCKETS, min_size=1, max_size=6))
def test_the_pipeline_ends_when_a_clock_says_so(buckets: list[BucketSeconds]) -> None:
    assert step_seconds(buckets) == _by_clock(buckets)


def _one(backward: float, before: float, p: float, between: float, q: float) -> BucketSeconds:
    return BucketSeconds(backward, StageSeconds(before, between, 1.0), p, q)


def test_a_fast_link_leaves_backward_and_the_last_buckets_stages() -> None:
    buckets = [_one(10, 1, 0, 1, 0)] * 5
    assert step_seconds(buckets) == 50 + 3


def test_on_a_slow_link_the_bytes_count() -> None:
    buckets = [BucketSeconds(1, StageSeconds(), 100, 200)] * 5
    assert step_seconds(buckets) == 1 + 5 * 300


def test_an_exact_bucket_is_reduced_once() -> None:
    assert step_seconds([BucketSeconds(5, StageSeconds(), 20)]) == 25
    exact, compressed = BucketSeconds(5, StageSeconds(), 20), _one(5, 1, 2, 1, 3)
    assert step_seconds([exact, compressed]) == 25 + 1 + 2 + 1 + 3 + 1


@pytest.mark.parametrize(
    ("world_size", "schedule"), [(2, "one-shot"), (4, "one-shot"), (9, "two-shot")]
)
@pytest.mark.parametrize("wire", ["int8", "int4", torch.bfloat16], ids=str)
def test_a_step_is_made_of_its_buckets(
    wire: torch.dtype | str, world_size: int, schedule: str
) -> None:
    options = tp.Options(matrix_approximation_rank=40, wire_dtype=wire)
    layout = [[[300, 200], [7]]]
    p, q = _C.traffic_of(layout[0], options._core(), torch.float32, world_size)
    if wire != "int4":  # its packets are small enough to gather
        assert (p.schedule, q.schedule) == (schedule, schedule)
    waits = {"one-shot": 1.0, "two-shot": 1.25}
    expected = 100 + 10 + 20 + 30.0
    for each in (p, q):
        copies = (
            world_size - 1 if each.schedule == "one-shot" else 2 * (world_size - 1) / world_size
        )
        assert each.sent_bytes == int(copies * each.payload_bytes)
        expected += waits[each.schedule] + LINK.per_byte * each.sent_bytes
    model = Model(layout, torch.float32, 100.0, LINK, world_size)
    assert model.seconds(options, [StageSeconds(10, 20, 30)]) == pytest.approx(expected)


def test_what_is_not_compressed_is_reduced_in_its_own_dtype() -> None:
    model = Model([[[40]], [[8, 8]]], torch.float64, 104.0, LINK, 4)
    expected = 104 + LINK.latency + LINK.per_byte * 6 / 4 * 8 * 64  # the first is done meanwhile
    options = tp.Options(matrix_approximation_rank=8, wire_dtype="int8")
    assert model.seconds(options, [StageSeconds()] * 2) == pytest.approx(expected)


def test_fewer_bytes_are_never_slower() -> None:
    model = Model(LAYOUT, torch.float32, 10.0, LINK, 2)
    stages = [StageSeconds(), StageSeconds(1, 2, 1), StageSeconds(1, 2, 1)]
    seconds = [
        model.seconds(tp.Options(matrix_approximation_rank=4, wire_dtype=wire), stages)
        for wire in ("int4", "int8", torch.bfloat16, torch.float32)
    ]
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1]


def test_samples_are_shifted_to_no_less_than_a_step_without_averaging() -> None:
    passes = [[1.0, 2.0], [3.0]]
    assert shifted(passes, 0.5, least=4.0) == [[1.5, 2.5], [3.5]]
    assert shifted(passes, -0.75, least=0.5) == [[0.25, 1.25], [2.25]]
    assert shifted(passes, -1.75, least=1.5) == [[0.5, 1.5], [2.5]]  # the median is that
    assert shifted(passes, -1.75, least=2.5) == passes


def test_the_bytes_of_a_ring() -> None:
    assert [bytes_in_ring(1200, world_size) for world_size in (1, 2, 3, 4)] == [0, 1200, 1600, 1800]


def _measured(rank: int) -> tuple[Link, list[StageSeconds]]:
    options = tp.Options(matrix_approximation_rank=4)
    return measure_link(CPU), measure_stages(LAYOUT, options, torch.float32, CPU)


def test_costs_are_measured_alike_on_all_ranks() -> None:
    first, second = ranks.run(2, _measured, backend="gloo")
    assert first == second
    link, (exact, *compressed) = first
    assert min(link.latency, link.gather, link.scatter, link.per_byte) > 0
    assert exact == StageSeconds()
    assert min(t for each in compressed for t in (each.before, each.between, each.after)) > 0
