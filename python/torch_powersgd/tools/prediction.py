# SPDX-License-Identifier: BSD-3-Clause
"""The step of a wire that was not rehearsed, predicted for ``advise``.

A wire changes the bytes that a step sends, and hardly its stages. So the prediction takes the steps
that were rehearsed at the same rank with another wire. It adds the difference of two modeled steps,
which are pipelines of buckets. All functions are pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_powersgd._core import _C
from torch_powersgd.options import Options
from torch_powersgd.tools.costs import Link, StageSeconds, bytes_in_ring
from torch_powersgd.tools.footprint import Layout, Shape, elements_of, matrices_of
from torch_powersgd.tools.verdict import Passes


@dataclass(frozen=True)
class BucketSeconds:
    """A bucket of a step.

    Attributes:
        backward: the backward pass, from the bucket before to this one.
        stages: the stages.
        p: the reduction of P, or of the whole bucket if it is exact.
        q: the reduction of Q. None if the bucket is exact.
    """

    backward: float
    stages: StageSeconds
    p: float
    q: float | None = None


@dataclass(frozen=True)
class Model:
    """What the modeled steps have in common.

    Attributes:
        layout: the shapes of the buckets.
        dtype: the dtype of the gradients.
        backward: the seconds of the backward pass.
        link: the group's link.
        world_size: the number of ranks.
    """

    layout: Layout
    dtype: torch.dtype
    backward: float
    link: Link
    world_size: int

    def seconds(self, options: Options, stages: Sequence[StageSeconds]) -> float:
        """The seconds from the start of the backward pass to the last output."""
        numel = sum(map(elements_of, self.layout))
        buckets = []
        for shapes, of_bucket in zip(self.layout, stages, strict=True):
            backward = self.backward * elements_of(shapes) / numel
            reductions = self._reductions(shapes, options)
            buckets.append(BucketSeconds(backward, of_bucket, *reductions))
        return step_seconds(buckets)

    def _reductions(self, shapes: list[Shape], options: Options) -> list[float]:
        if matrices_of(shapes, options):
            payloads = _C.traffic_of(shapes, options._core(), self.dtype, self.world_size)
            return [self.link.seconds(each.schedule, each.sent_bytes) for each in payloads]
        sent = bytes_in_ring(elements_of(shapes) * self.dtype.itemsize, self.world_size)
        return [self.link.seconds("all-reduce", sent)]


def step_seconds(buckets: Sequence[BucketSeconds]) -> float:
    """The seconds from the start of the backward pass to the last output.

    Two lanes work on the buckets in their order. One takes each bucket until its P is summed, and
    the other takes it from there. They share the link, which serves the lane that asks first.
    """
    ready = first_lane = second_lane = link = 0.0
    coming = deque(buckets)
    summed: deque[tuple[BucketSeconds, float]] = deque()  # with the time since which P is summed
    while coming or summed:
        asks_p = asks_q = math.inf
        if coming:
            asks_p = max(ready + coming[0].backward, first_lane) + coming[0].stages.before
        if summed:
            bucket, since = summed[0]
            asks_q = max(since, second_lane) + bucket.stages.between
        if asks_p <= asks_q:
            bucket = coming.popleft()
            ready += bucket.backward
            link = first_lane = max(link, asks_p) + bucket.p
            if bucket.q is not None:
                summed.append((bucket, first_lane))
        else:
            bucket, _ = summed.popleft()
            link = max(link, asks_q) + (bucket.q or 0.0)
            second_lane = link + bucket.stages.after
    return max(first_lane, second_lane)


def shifted(passes: Passes, seconds: float, least: float) -> Passes:
    """Samples that all differ by so many seconds, and are not shorter than ``least``."""
    return [[max(sample + seconds, least) for sample in block] for block in passes]
