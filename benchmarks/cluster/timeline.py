# SPDX-License-Identifier: BSD-3-Clause
"""When each part of a step begins on each rank, from marks in the streams, and what they add up to.

A mark is an event in the stream of whatever comes next, or a time of the host on a CPU. No profiler
is used, because CUPTI loses kernels.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from clock import Clock, covered
from launcher.ranks import Rank

from cluster.rank import Job, Trainer, group

# The part that begins, its bucket or -1, when the device begins it, and when the host enqueued it,
# in milliseconds.
Mark = tuple[str, int, float, float]

_STAGES = ("project", "orthogonalize", "back_project", "reconstruct")
STAGE, PACKETS, WIRE, WAITS = "stages", "packets", "wire", "waits"


class Part(NamedTuple):
    """A part of a bucket's step on one rank, in milliseconds."""

    bucket: int
    name: str
    kind: str
    start: float
    end: float


class _Marks:
    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._marks: list[tuple[str, int, Any, float]] = []

    def add(self, name: str, bucket: int = -1) -> None:
        self._marks.append((name, bucket, self._clock.mark(), time.perf_counter() * 1e3))

    def by_step(self) -> list[list[Mark]]:
        """The marks of each step. The device is idle when a step begins, so the clocks agree."""
        steps: list[list[Mark]] = []
        for name, bucket, mark, host in self._marks:
            if name == "forward":
                first, began = mark, host
                steps.append([])
            ms = began + self._clock.milliseconds(first, mark)
            steps[-1].append((name, bucket, ms, host))
        return steps


def watch(rank: Rank, job: Job, warmup: int, steps: int) -> tuple[str, list[list[Mark]]]:
    """Trains. Returns the GPU's name, and the marks of each step after the warm-up."""
    from torch_powersgd.group_backends import find_backends

    with group(rank, job.contender, job.device, job.seed):
        trainer = Trainer(rank, job)
        trainer.turn(warmup, lambda record: None)
        marks = _Marks(trainer.device)
        trainer.mark = marks.add
        if job.contender.how.options:
            for backend in find_backends(None):
                backend._call_at_stages(marks.add)
        trainer.turn(1 + steps, lambda record: None)
        name = torch.cuda.get_device_name() if job.device == "cuda" else ""
        return name, marks.by_step()[1:]


def from_first_backward(by_rank: Sequence[Sequence[Mark]]) -> list[list[Mark]]:
    """The marks of one step on all ranks, since the first rank began its backward pass."""
    zero = min(time_of("backward", marks) for marks in by_rank)
    return [
        [(name, bucket, ms - zero, host - zero) for name, bucket, ms, host in marks]
        for marks in by_rank
    ]


def time_of(name: str, marks: Iterable[Mark]) -> float:
    """When the last mark of this name is reached."""
    return max(mark[2] for mark in marks if mark[0] == name)


def parts_of(marks: Sequence[Mark], one_at_a_time: bool) -> list[Part]:
    """The parts of all buckets on one rank, bucket by bucket.

    Args:
        marks: the rank's.
        one_at_a_time: collectives wait for the previous one to end, as NCCL's do.
    """
    of_bucket: dict[int, list[Mark]] = defaultdict(list)
    for mark in marks:
        of_bucket[mark[1]].append(mark)
    parts = []
    for bucket, reached in of_bucket.items():
        factor = "P"
        for (name, _, start, _), (after, _, end, _) in zip(reached, reached[1:], strict=False):
            factor = "q" if name == "reduce_q" else factor
            if bucket >= 0:
                parts.append(Part(bucket, *_described(name, after, factor), start, end))
    if not one_at_a_time:
        return parts
    ends = sorted(part.end for part in parts if part.kind == WIRE)
    free = dict(zip(ends[1:], ends, strict=False))  # when the wire is, by the collective's end
    return [
        part._replace(start=max(part.start, free.get(part.end, part.start)))
        if part.kind == WIRE
        else part
        for part in parts
    ]


def _described(name: str, after: str, factor: str) -> tuple[str, str]:
    """The name and the kind of what lies between two marks of a bucket."""
    if name in _STAGES:
        return name, STAGE
    if name == "collective":
        return f"{factor} on the wire", WIRE
    if name in ("reduce_p", "reduce_q", "received") or after == "collective":
        return f"packets of {factor}", PACKETS
    return "waits", WAITS


def phases(by_rank: Sequence[Sequence[Mark]], one_at_a_time: bool) -> dict[str, float]:
    """The PHASES of a step in milliseconds, as means over the ranks."""
    parts = [parts_of(marks, one_at_a_time) for marks in by_rank]
    joined = [max(part.start for part in same) for same in zip(*parts, strict=True)]
    of_ranks = [_phases(*each, joined) for each in zip(by_rank, parts, strict=True)]
    means = map(statistics.mean, zip(*of_ranks, strict=True))
    return dict(zip(PHASES, means, strict=True))


# "After backward" begins when the last bucket is ready, and is the sum of the four phases that
# follow it. Where the wire is busy too, stages and packets count as computing. Before the last rank
# has begun a collective, the others wait for it.
PHASES = (
    *("step", "forward", "backward", "after backward"),
    *("computing", "waiting for a rank", "wire", "idle", "optimizer"),
)


def _phases(marks: Sequence[Mark], parts: Sequence[Part], joined: Sequence[float]) -> list[float]:
    """The phases on one rank. `joined`: when the last rank has begun each part."""
    begins = [time_of(name, marks) for name in ("forward", "backward", "optimizer", "end")]
    forward, backward, optimizer, end = begins
    ready = max([mark[2] for mark in marks if mark[0] == "ready"], default=optimizer)
    tail = (ready, optimizer)
    computing = [(part.start, part.end) for part in parts if part.kind in (STAGE, PACKETS)]
    wire = [(part, began) for part, began in zip(parts, joined, strict=True) if part.kind == WIRE]
    until_joined = [(part.start, min(part.end, began)) for part, began in wire]
    whole = [(part.start, part.end) for part, _ in wire]
    busy = [covered(computing + spans, tail) for spans in ([], until_joined, whole)]
    return [
        *(end - forward, backward - forward, ready - backward, optimizer - ready),
        *(busy[0], busy[1] - busy[0], busy[2] - busy[1], optimizer - ready - busy[2]),
        end - optimizer,
    ]


def median_step(steps: Sequence[Sequence[Sequence[Mark]]]) -> Sequence[Sequence[Mark]]:
    """The marks of the step of median length, by rank."""
    return sorted(steps, key=lambda by_rank: time_of("end", itertools.chain(*by_rank)))[
        len(steps) // 2
    ]
