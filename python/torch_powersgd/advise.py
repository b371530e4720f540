# SPDX-License-Identifier: BSD-3-Clause
"""Whether compression pays on this group: ``torchrun ... -m torch_powersgd advise``.

What averaging the gradients adds to a step of DDP is rehearsed, plain and compressed: buckets of
noise are averaged while something else computes (rehearsal.py). DDP's own copies between gradients
and buckets are not in it. Its parts, the stages alone and what the wire alone would take (latency +
bytes / bandwidth, as measured on the group), tell where the time goes; they overlap each other and
the backward pass.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from torch_powersgd._backend import find_backend
from torch_powersgd._core import _C
from torch_powersgd.options import Options
from torch_powersgd.rehearsal import Rehearsal, StartAverage, slowest, synchronize

# DDP's defaults: the first bucket, and all others.
BUCKET_BYTES = [1 << 20, 25 << 20]
REPEATS = 5
ENOUGH_SECONDS = 0.2  # a transfer that takes so long shows the bandwidth
LARGEST_TRANSFER = 1 << 23  # elements
BACKENDS = {"cpu": "cpu:powersgd", "cuda": "cpu:gloo,cuda:powersgd"}
WORTH_IT = 0.9  # of the plain step's time: less than that is said not to pay

Layout = list[list[list[int]]]  # the shapes of each bucket


@dataclass(frozen=True)
class Link:
    """What an all-reduce takes: seconds, and seconds per byte."""

    latency: float
    per_byte: float

    def seconds(self, size: float) -> float:
        return self.latency + size * self.per_byte


@dataclass(frozen=True)
class Setting:
    """What predictions are made from."""

    layout: Layout
    device: torch.device
    link: Link
    rehearsal: Rehearsal


@dataclass(frozen=True)
class Prediction:
    """Of what averaging the gradients takes."""

    name: str
    sent_bytes: int
    wire_seconds: float  # alone
    stage_seconds: float  # alone
    seconds: float  # that it adds to a step


def buckets_of(shapes: list[list[int]], dtype: torch.dtype = torch.float32) -> Layout:
    """DDP's own assignment, after it has rebuilt its buckets in the order of backward."""
    backward = shapes[::-1]
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in backward]
    assignment, _ = _compute_bucket_assignment_by_size(tensors, BUCKET_BYTES)
    return [[backward[i] for i in indices] for indices in assignment]


def measure_link(device: torch.device) -> Link:
    """Of the default group. Collective; a few seconds at most."""
    latency = _all_reduce_seconds(1, device)
    numel, seconds = 1 << 16, 0.0
    while seconds < ENOUGH_SECONDS and numel < LARGEST_TRANSFER:
        numel *= 2
        seconds = _all_reduce_seconds(numel, device)
    return Link(latency, max(seconds - latency, 1e-9) / (4 * numel))


def measure(layout: Layout, device: torch.device, backward: float | None = None) -> Setting:
    """The default group, whose backend is powersgd, for a model with these buckets of float32.

    Collective, as are predictions.

    Args:
        layout: of the model, as DDP makes it.
        device: where its gradients are.
        backward: seconds of its backward pass; None: as the rehearsal thinks fit.
    """
    numels = [_bytes_of(shapes) // 4 for shapes in layout]
    return Setting(layout, device, measure_link(device), Rehearsal(numels, device, backward))


def predict(setting: Setting, options: Options) -> Prediction:
    """Of training with these options."""
    core, link, device = options._core(), setting.link, setting.device
    wire = stages = 0.0
    sent = 0
    for shapes in setting.layout:
        if not any(_C.should_compress(*_C.matrix_shape(shape, []), core) for shape in shapes):
            size = _bytes_of(shapes)
            wire += link.seconds(size)
            sent += size
            continue
        compressor = _C.BucketCompressor(shapes, core, torch.float32, str(device))
        seconds, payload_bytes = _measure_stages(compressor, device)
        all_reduces = 1 if options.alternating else 2
        wire += all_reduces * link.latency + payload_bytes * link.per_byte
        sent += payload_bytes
        stages += seconds
    name = f"rank {options.matrix_approximation_rank}"
    stages = slowest(stages, device)
    start = _start_compressed(setting.layout, options, device)
    added = setting.rehearsal.added(start, setting.rehearsal.alone(start))
    return Prediction(name, sent, wire, stages, added)


def predict_plain(setting: Setting) -> Prediction:
    sizes = [_bytes_of(shapes) for shapes in setting.layout]
    wire = sum(map(setting.link.seconds, sizes))
    return Prediction("plain", sum(sizes), wire, 0.0, setting.rehearsal.added(_start_plain, wire))


def print_advice(
    model: torch.nn.Module,
    options: list[Options],
    device_type: str,
    backward: float | None = None,
) -> None:
    """Measures, and on rank 0 prints a table and what to set. Collective.

    Args:
        model: whose gradients are averaged.
        options: to compare.
        device_type: where the model trains: "cpu" or "cuda".
        backward: seconds of its backward pass, behind which averaging hides.

    Raises:
        ValueError: if it was not started by torchrun.
    """
    if "RANK" not in os.environ:
        raise ValueError("advise measures the group: start it with torchrun, on all machines")
    device = torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[device_type])
    try:
        shapes = [list(p.shape) for p in model.parameters() if p.requires_grad]
        setting = measure(buckets_of(shapes), device, backward)
        plain = predict_plain(setting)
        compressed = [predict(setting, each) for each in options]
        if dist.get_rank() == 0:
            _print(setting.link, plain, compressed)
    finally:
        dist.destroy_process_group()


def verdict(plain: Prediction, compressed: list[Prediction]) -> str:
    """What to do."""
    paying = [each for each in compressed if each.seconds < WORTH_IT * plain.seconds]
    if not paying:
        return (
            "Compression will not pay here: the plain backend is as fast as, or faster than, the "
            "stages and the factors."
        )
    best = min(paying, key=lambda each: each.seconds)
    # The highest rank that costs little more than the fastest: it approximates best.
    chosen = [each for each in paying if each.seconds < best.seconds + 0.1 * plain.seconds][-1]
    gain = plain.seconds / chosen.seconds
    return (
        f"Compression pays: Options(matrix_approximation_rank={chosen.name.split()[-1]}) takes "
        f"{chosen.seconds * 1e3:.1f} ms for what takes {plain.seconds * 1e3:.1f} ms, {gain:.1f} "
        "times less. Compare the losses before relying on it."
    )


def _print(link: Link, plain: Prediction, compressed: list[Prediction]) -> None:
    from rich.console import Console
    from rich.table import Table

    bandwidth = 8e-9 / link.per_byte
    title = (
        f"averaging a step's gradients over {dist.get_world_size()} ranks: latency "
        f"{link.latency * 1e3:.2f} ms, {bandwidth:.2f} Gbit/s of gradient"
    )
    table = Table(title=title)
    for heading in ("", "sent, MB", "wire, ms", "stages, ms", "added, ms", "plain / this"):
        table.add_column(heading, justify="right" if heading else "left")
    for each in (plain, *compressed):
        table.add_row(
            each.name,
            f"{each.sent_bytes / 1e6:.3f}",
            f"{each.wire_seconds * 1e3:.1f}",
            f"{each.stage_seconds * 1e3:.1f}",
            f"{each.seconds * 1e3:.1f}",
            f"{plain.seconds / each.seconds:.1f}",
        )
    console = Console()
    console.print(table)
    console.print(verdict(plain, compressed), soft_wrap=True)


def _bytes_of(shapes: list[list[int]]) -> int:
    return 4 * sum(torch.Size(shape).numel() for shape in shapes)


def _all_reduce_seconds(numel: int, device: torch.device) -> float:
    """Median over repeats of the slowest rank's."""
    tensor = torch.zeros(numel, device=device)
    times = []
    for _ in range(REPEATS + 1):  # the first sets connections up
        synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return slowest(statistics.median(times[1:]), device)


def run_stages(compressor: _C.BucketCompressor, gradient: torch.Tensor, step: int) -> None:
    """A step of one rank, in place."""
    compressor.project(gradient, step)
    compressor.orthogonalize()
    if compressor.sends == "PQ":
        compressor.back_project()
    compressor.reconstruct()


def _measure_stages(compressor: _C.BucketCompressor, device: torch.device) -> tuple[float, int]:
    """Seconds and bytes of a step."""
    gradient = torch.randn(compressor.gradient_bytes // 4, device=device)
    times, sizes = [], []
    for step in range(2 + 2 * REPEATS):  # the first two allocate
        source = gradient.clone()
        synchronize(device)
        start = time.perf_counter()
        run_stages(compressor, source, step)
        synchronize(device)
        times.append(time.perf_counter() - start)
        sizes.append(compressor.payload_bytes)
    # Steps of either parity count alike: they differ in the alternating mode.
    seconds = (statistics.median(times[2::2]) + statistics.median(times[3::2])) / 2
    return seconds, (sizes[-1] + sizes[-2]) // 2


def _start_plain(_bucket: int, buffer: torch.Tensor) -> dist.Work:
    # Outside of a backward pass the backend hands everything on.
    work: dist.Work = dist.all_reduce(buffer, async_op=True)
    return work


def _start_compressed(layout: Layout, options: Options, device: torch.device) -> StartAverage:
    backend = find_backend(None, device)
    assert backend is not None, "the default group's backend is powersgd"
    shapes = [shape for bucket in layout for shape in bucket]
    names = [str(i) for i in range(len(shapes))]
    parameters = [torch.empty(shape, device=device) for shape in shapes]
    model = _C.AttachedModel(backend, names, parameters, options._core())
    ends = list(itertools.accumulate(map(len, layout)))
    members = [list(range(end - len(b), end)) for end, b in zip(ends, layout, strict=True)]

    def start(bucket: int, buffer: torch.Tensor) -> dist.Work:
        if bucket == 0:
            model.end_step()  # the last one
        work: dist.Work = model.reduce(bucket, buffer, members[bucket], dist.get_world_size())
        return work

    return start
