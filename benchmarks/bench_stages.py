# SPDX-License-Identifier: BSD-3-Clause
"""How long do the four stages take, against torch's hook and against the copy speed?

    python benchmarks/bench_stages.py --models resnet18 demo --ranks 4

One process, no network. In the same run and on the same buckets: the stages of this project, one by
one; torch's powerSGD_hook, whole, in a group of one rank (its all-reduces send nothing); and the
floor, five passes over the gradient at the speed at which this machine copies it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import shapes
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import torch_powersgd
from torch_powersgd._core import _C

STAGES = ("project", "orthogonalize", "back_project", "reconstruct")
# project reads G and memory and writes memory; back_project reads memory; reconstruct writes G.
FLOOR_PASSES = 5


def median_ms(run: Callable[[], None], repeats: int, before: Callable[[], None]) -> float:
    """The median time of run(), each after an untimed before()."""
    times = []
    for _ in range(repeats):
        before()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


class Ours:
    """This project's stages, timed one by one."""

    def __init__(self, layout: list[list[shapes.Shape]], rank: int, dtype: torch.dtype) -> None:
        options = torch_powersgd.Options(matrix_approximation_rank=rank)._core()
        self.buckets = [_C.BucketCompressor(bucket, options, dtype) for bucket in layout]
        self.seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self.step = 0

    def run(self, gradients: list[torch.Tensor]) -> None:
        spent = dict.fromkeys(STAGES, 0.0)
        for compressor, gradient in zip(self.buckets, gradients, strict=True):
            for stage in STAGES:
                method = getattr(compressor, stage)
                start = time.perf_counter()
                method(gradient, self.step) if stage == "project" else method()
                spent[stage] += time.perf_counter() - start
        self.step += 1
        for stage in STAGES:
            self.seconds[stage].append(spent[stage])

    def stage_ms(self, repeats: int) -> dict[str, float]:
        return {
            stage: statistics.median(seconds[-repeats:]) * 1e3
            for stage, seconds in self.seconds.items()
        }


class Bucket:
    """What powerSGD_hook asks of a dist.GradBucket, which Python cannot construct."""

    def __init__(self, index: int, count: int, layout: list[shapes.Shape]) -> None:
        self._index, self._count, self._layout = index, count, layout
        self._buffer = torch.empty(0)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._index == self._count - 1

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([math.prod(shape) for shape in self._layout])
        return [part.view(shape) for part, shape in zip(parts, self._layout, strict=True)]


class Hook:
    """torch's powerSGD_hook on the same buckets."""

    def __init__(self, layout: list[list[shapes.Shape]], rank: int) -> None:
        self.state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        self.buckets = [Bucket(i, len(layout), shapes_) for i, shapes_ in enumerate(layout)]

    def run(self, gradients: list[torch.Tensor]) -> None:
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.set_buffer(gradient)
            powerSGD_hook.powerSGD_hook(self.state, bucket).wait()


def bench(model: str, rank: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    layout = shapes.buckets(shapes.MODELS[model](), dtype)
    sizes = [sum(math.prod(shape) for shape in bucket) for bucket in layout]
    torch.manual_seed(0)
    sources = [torch.randn(size).to(dtype) for size in sizes]
    gradients = [source.clone() for source in sources]

    def refill() -> None:  # the stages overwrite the gradient
        for gradient, source in zip(gradients, sources, strict=True):
            gradient.copy_(source)

    def copy() -> None:  # reads and writes: two passes
        refill()

    ours, hook = Ours(layout, rank, dtype), Hook(layout, rank)
    for _ in range(3):  # the hook's first two steps only set up; allocations and start-up
        refill()
        ours.run(gradients)
        refill()
        hook.run(gradients)
    ours_ms = median_ms(lambda: ours.run(gradients), repeats, refill)
    hook_ms = median_ms(lambda: hook.run(gradients), max(3, repeats // 3), refill)
    copy_ms = median_ms(copy, repeats, lambda: None)
    floor_ms = copy_ms * FLOOR_PASSES / 2
    gradient_bytes = sum(compressor.gradient_bytes for compressor in ours.buckets)
    return {
        "model": model,
        "rank": rank,
        "dtype": str(dtype).removeprefix("torch."),
        "elements": sum(sizes),
        "buckets": len(layout),
        "stage_ms": ours.stage_ms(repeats),
        "ours_ms": ours_ms,
        "hook_ms": hook_ms,
        "floor_ms": floor_ms,
        "ours_over_floor": ours_ms / floor_ms,
        "hook_over_ours": hook_ms / ours_ms,
        # The bus bandwidth below which compression pays: an all-reduce moves 2 bytes(G).
        "break_even_gbyte_per_s": 2 * gradient_bytes / (ours_ms * 1e-3) / 1e9,
    }


def show(results: list[dict[str, Any]], threads: int) -> None:
    table = Table(title=f"ms per step, {threads} thread(s)")
    table.add_column("model")
    headings = ("rank", "dtype", *STAGES, "all", "hook", "floor", "/ floor", "hook / ours", "GB/s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in results:
        table.add_row(
            f"{r['model']} ({r['elements'] / 1e6:.1f} M)",
            str(r["rank"]),
            r["dtype"],
            *(f"{r['stage_ms'][stage]:.2f}" for stage in STAGES),
            *(f"{r[key]:.2f}" for key in ("ours_ms", "hook_ms", "floor_ms", "ours_over_floor")),
            f"{r['hook_over_ours']:.1f}",
            f"{r['break_even_gbyte_per_s']:.1f}",
        )
    Console(width=130).print(table)


def provenance() -> dict[str, str]:
    """Where and of what the figures were measured."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "date": date.today().isoformat(),
        "device": cpu,
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["resnet18", "demo"], choices=shapes.MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        results = [
            bench(model, rank, getattr(torch, dtype), arguments.repeats)
            for model in arguments.models
            for dtype in arguments.dtypes
            for rank in arguments.ranks
        ]
        dist.destroy_process_group()
    show(results, arguments.threads)
    if arguments.json:
        record = {**provenance(), "threads": arguments.threads, "results": results}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
