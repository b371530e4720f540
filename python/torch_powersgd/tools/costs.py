# SPDX-License-Identifier: BSD-3-Clause
"""The measured costs of a step's parts: the link of the group, and the stages of each bucket."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torch_powersgd._core import _C
from torch_powersgd.options import Options
from torch_powersgd.tools.footprint import Shape, as_reals, elements_of, matrices_of
from torch_powersgd.tools.rehearsal import slowest, synchronize

REPEATS = 5
ENOUGH_SECONDS = 0.2  # a transfer of this length shows the bandwidth
LARGEST_TRANSFER = 1 << 23  # elements
STAGE_REPEATS = 3


@dataclass(frozen=True)
class Link:
    """The costs of collectives, in seconds.

    Attributes:
        latency: a small all-reduce.
        gather: a small all-gather.
        scatter: a small all-to-all, which waits less than an all-gather among many ranks.
        per_byte: each byte that a rank sends.
    """

    latency: float
    gather: float
    scatter: float
    per_byte: float

    def seconds(self, schedule: str, sent_bytes: int) -> float:
        """The seconds of a reduction by its schedule, and by the bytes that leave a rank."""
        waits = {"one-shot": self.gather, "two-shot": self.scatter + self.gather}
        return waits.get(schedule, self.latency) + sent_bytes * self.per_byte


@dataclass(frozen=True)
class StageSeconds:
    """The stages of a bucket: before P is sent, between P and Q, and after Q. Zeros if exact."""

    before: float = 0.0
    between: float = 0.0
    after: float = 0.0


def bytes_in_ring(size: int, world_size: int) -> int:
    """The bytes that leave a rank in an all-reduce of ``size`` bytes."""
    return 2 * (world_size - 1) * size // world_size


def measure_link(device: torch.device) -> Link:
    """The default group's link. Collective; it takes a few seconds at most."""
    world_size = dist.get_world_size()
    mine = torch.zeros(1, device=device)
    everyone = [torch.zeros(1, device=device) for _ in range(world_size)]
    each, received = torch.zeros(2, world_size, device=device)
    gather = _seconds(lambda: dist.all_gather(everyone, mine), device)
    scatter = _seconds(lambda: dist.all_to_all_single(received, each), device)
    latency = _all_reduce_seconds(1, device)
    numel, seconds = 1 << 16, 0.0
    while seconds < ENOUGH_SECONDS and numel < LARGEST_TRANSFER:
        numel *= 2
        seconds = _all_reduce_seconds(numel, device)
    sent = max(bytes_in_ring(4 * numel, world_size), 1)
    return Link(latency, gather, scatter, max(seconds - latency, 1e-9) / sent)


def measure_stages(
    layout: Sequence[list[Shape]],
    options: Options,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[StageSeconds]:
    """The stages of each bucket on the slowest rank. Collective; all ranks compute at a time."""
    mine = [
        seconds
        for shapes in layout
        for seconds in (
            _stages_of_bucket(shapes, options, dtype, device, group)
            if matrices_of(shapes, options)
            else (0.0, 0.0, 0.0)
        )
    ]
    parts = slowest(mine, device, group)
    return [StageSeconds(*parts[i : i + 3]) for i in range(0, len(parts), 3)]


def milliseconds_of(
    parameters: Sequence[torch.Tensor], options: Options, group: dist.ProcessGroup
) -> list[float]:
    """The stages of each parameter alone, in milliseconds on the slowest rank. Collective.

    Parameters that are sent raw take 0. Those of one shape and dtype are measured once.
    """
    reals = [as_reals(parameter) for parameter in parameters]
    kinds = dict.fromkeys((tuple(p.shape), p.dtype) for p in reals)
    device = parameters[0].device
    milliseconds = {}
    for shape, dtype in kinds:
        [stages] = measure_stages([[list(shape)]], options, dtype, device, group)
        milliseconds[shape, dtype] = 1e3 * (stages.before + stages.between + stages.after)
    return [milliseconds[tuple(p.shape), p.dtype] for p in reals]


def _stages_of_bucket(
    shapes: list[Shape],
    options: Options,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[float, ...]:
    compressor = _C.BucketCompressor(shapes, options._core(), dtype, device.type)
    gradient = torch.randn(elements_of(shapes), device=device, dtype=dtype)

    def parts(step: int) -> Iterator[None]:
        compressor.project(gradient, step)
        yield
        compressor.orthogonalize()
        compressor.back_project()
        yield
        compressor.reconstruct()
        yield

    times = []
    for step in range(STAGE_REPEATS + 1):  # the first one allocates
        dist.barrier(group)
        times.append(_timed(parts(step), device))
    return tuple(map(statistics.median, zip(*times[1:], strict=True)))


def _timed(parts: Iterator[None], device: torch.device) -> list[float]:
    """The seconds of each part of a generator."""
    synchronize(device)
    clock = [time.perf_counter()]
    for _ in parts:
        synchronize(device)
        clock.append(time.perf_counter())
    return [end - begin for begin, end in zip(clock, clock[1:], strict=False)]


def _all_reduce_seconds(numel: int, device: torch.device) -> float:
    tensor = torch.zeros(numel, device=device)
    return _seconds(lambda: dist.all_reduce(tensor), device)


def _seconds(collective: Callable[[], object], device: torch.device) -> float:
    """The median over repeats of the slowest rank."""
    times = []
    for _ in range(REPEATS + 1):  # the first one makes connections
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        collective()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return slowest([statistics.median(times[1:])], device)[0]
