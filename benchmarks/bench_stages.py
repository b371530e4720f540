# SPDX-License-Identifier: BSD-3-Clause
"""Measures the four stages, against torch's hook and against the copy speed.

    python benchmarks/bench_stages.py --models resnet18 demo --ranks 4
    python benchmarks/bench_stages.py --device cuda --models resnet50 gpt2 llama --ranks 1 4 32

It is one process without a network. One run measures three things on the same buckets: the stages
of this project, one by one and together; torch's whole powerSGD_hook in a group of one rank, whose
all-reduces send nothing; and the floor. The floor is five passes over the gradient at the speed at
which the device copies it.

On a GPU, "all" and "hook" begin on an idle device and include the launches. The stages and "queued"
are measured while the host is ahead of the device, as it is in a backward pass.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any, cast

import shapes
import torch
import torch.distributed as dist
from clock import Clock, PeakMemory, profile
from provenance import processor, provenance
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import torch_powersgd
from torch_powersgd._core import _C
from torch_powersgd.tools.footprint import Layout, buckets_of

STAGES = ("project", "orthogonalize", "back_project", "reconstruct")
# project reads G and the residual and writes the residual; back_project reads it; reconstruct
# writes G.
FLOOR_PASSES = 5


class Ours:
    """The stages of this project."""

    def __init__(
        self,
        layout: Layout,
        options: torch_powersgd.Options,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.buckets = [
            _C.BucketCompressor(bucket, options._core(), dtype, str(device)) for bucket in layout
        ]
        self.step = 0

    def run(self, gradients: list[torch.Tensor], clock: Clock | None = None) -> dict[str, Any]:
        """Runs one step. With a clock it returns the marks before and after every stage."""
        marks: dict[str, Any] = {stage: [] for stage in STAGES}
        for compressor, gradient in zip(self.buckets, gradients, strict=True):
            for stage in STAGES:
                start = clock.mark() if clock else None
                method = getattr(compressor, stage)
                method(gradient, self.step) if stage == "project" else method()
                if clock:
                    marks[stage].append((start, clock.mark()))
        self.step += 1
        return marks

    def stage_ms(
        self, clock: Clock, gradients: list[torch.Tensor], repeats: int, refill: Any
    ) -> dict[str, float]:
        times: dict[str, list[float]] = {stage: [] for stage in STAGES}
        for _ in range(repeats):
            refill()
            clock.get_ahead()
            for stage, pairs in self.run(gradients, clock).items():
                times[stage].append(sum(clock.milliseconds(*pair) for pair in pairs))
        return {stage: statistics.median(ms) for stage, ms in times.items()}


class Bucket:
    """The part of dist.GradBucket that powerSGD_hook uses. Python cannot construct a GradBucket."""

    def __init__(self, index: int, count: int, layout: list[list[int]]) -> None:
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
        parts = torch.split(self._buffer, [math.prod(shape) for shape in self._layout])
        return [part.view(shape) for part, shape in zip(parts, self._layout, strict=True)]


class Hook:
    """torch's powerSGD_hook on the same buckets."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        self.buckets = [Bucket(i, len(layout), shapes_) for i, shapes_ in enumerate(layout)]

    def run(self, gradients: list[torch.Tensor]) -> None:
        for bucket, gradient in zip(self.buckets, gradients, strict=True):
            bucket.set_buffer(gradient)
            powerSGD_hook.powerSGD_hook(self.state, cast(dist.GradBucket, bucket)).wait()


def bench(
    model: str,
    options: torch_powersgd.Options,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    rank = options.matrix_approximation_rank
    layout = buckets_of([list(shape) for shape in shapes.MODELS[model]()], dtype)
    sizes = [sum(math.prod(shape) for shape in bucket) for bucket in layout]
    torch.manual_seed(0)
    sources = [torch.randn(size, device=device).to(dtype) for size in sizes]
    gradients = [source.clone() for source in sources]
    clock = Clock(device)

    def refill() -> None:
        """Restores the gradients, which the stages overwrite."""
        for gradient, source in zip(gradients, sources, strict=True):
            gradient.copy_(source)

    def measure(contestant: Ours | Hook, repeats: int) -> dict[str, float]:
        memory = PeakMemory(device)
        for _ in range(3):  # the first steps allocate, and the hook's first two do not compress
            refill()
            contestant.run(gradients)
        result = {"ms": clock.median(lambda: contestant.run(gradients), repeats, refill)}
        result["memory_bytes"] = memory.bytes()
        if device.type == "cuda":
            refill()
            result.update(profile(lambda: contestant.run(gradients)))
        return result

    ours = Ours(layout, options, dtype, device)
    ours_result = measure(ours, repeats)
    ours_result["queued_ms"] = clock.median(
        lambda: ours.run(gradients), repeats, refill, ahead=True
    )
    stage_ms = ours.stage_ms(clock, gradients, repeats, refill)
    hook_result = measure(Hook(layout, rank), max(3, repeats // 3))
    copy_ms = clock.median(refill, repeats, ahead=True)  # reads and writes: two passes
    floor_ms = copy_ms * FLOOR_PASSES / 2
    gradient_bytes = sum(compressor.gradient_bytes for compressor in ours.buckets)
    return {
        "model": model,
        "rank": rank,
        "dtype": _name(dtype),
        "residual_dtype": _name(options.residual_dtype),
        "elements": sum(sizes),
        "buckets": len(layout),
        "gradient_bytes": gradient_bytes,
        "stage_ms": stage_ms,
        "ours": ours_result,
        "hook": hook_result,
        "floor_ms": floor_ms,
        "copy_gbyte_per_s": 2 * gradient_bytes / (copy_ms * 1e-3) / 1e9,
        "ours_over_floor": ours_result["queued_ms"] / floor_ms,
        "hook_over_ours": hook_result["ms"] / ours_result["ms"],
        # The bus bandwidth below which compression pays: an all-reduce moves 2 bytes(G).
        "break_even_gbyte_per_s": 2 * gradient_bytes / (ours_result["queued_ms"] * 1e-3) / 1e9,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def row(r: dict[str, Any]) -> list[str]:
    ours, hook = r["ours"], r["hook"]
    cells = [f"{r['model']} ({r['elements'] / 1e6:.1f} M)", str(r["rank"])]
    cells += [r["dtype"], r["residual_dtype"]]
    cells += [f"{r['stage_ms'][stage]:.3f}" for stage in STAGES]
    cells += [f"{ms:.3f}" for ms in (ours["ms"], ours["queued_ms"], hook["ms"], r["floor_ms"])]
    cells += [f"{r['ours_over_floor']:.2f}", f"{r['hook_over_ours']:.1f}"]
    cells += [f"{r['break_even_gbyte_per_s']:.0f}"]
    for who in (ours, hook):
        cells.append(f"{who['launches'] / r['buckets']:.1f}" if "launches" in who else "-")
        cells.append(f"{who['memory_bytes'] / r['gradient_bytes']:.2f}")
    return cells


def show(results: list[dict[str, Any]], where: str) -> None:
    """Prints milliseconds per step, launches per bucket, and peak memory over the gradient's."""
    print(f"ms per step, {where}; launches per bucket; peak memory / gradient")
    headings = ["model", "rank", "gradient", "residual", "project", "orth.", "back", "recon."]
    headings += ["all", "queued", "hook", "floor", "/ floor", "hook / all", "GB/s"]
    headings += ["launches", "memory", "hook's l.", "hook's m."]
    table = [headings, *(row(result) for result in results)]
    widths = [max(len(line[i]) for line in table) for i in range(len(headings))]
    for line in table:
        first = line[0].ljust(widths[0])
        others = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        print("  ".join([first, *others]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--device", default="cpu", choices=["cpu", "cuda"], help="device that computes (cpu)")
    add("--models", nargs="+", default=["resnet18", "demo"], choices=shapes.MODELS)
    add("--ranks", nargs="+", type=int, default=[4], help="ranks of the approximation (4)")
    add(
        "--dtypes",
        nargs="+",
        default=["float32"],
        metavar="GRADIENT[/RESIDUAL]",
        help="dtypes of the gradients and of the residuals (float32/float32)",
    )
    add("--threads", type=int, default=1, help="number of threads on a CPU (1)")
    add("--repeats", type=int, default=15, help="number of timed steps (15)")
    add("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    record: dict[str, Any] = {**provenance(name), "threads": arguments.threads, "results": []}
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        for model in arguments.models:
            for dtype in arguments.dtypes:
                for rank in arguments.ranks:
                    gradient, _, residual = dtype.partition("/")
                    options = torch_powersgd.Options(
                        matrix_approximation_rank=rank,
                        residual_dtype=getattr(torch, residual or "float32"),
                    )
                    kind = getattr(torch, gradient)
                    result = bench(model, options, kind, device, arguments.repeats)
                    record["results"].append(result)
                    if arguments.json:  # after each, so that a time limit loses nothing
                        arguments.json.parent.mkdir(parents=True, exist_ok=True)
                        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
        dist.destroy_process_group()
    threads = f", {arguments.threads} thread(s)" if device.type == "cpu" else ""
    show(record["results"], record["device"] + threads)


if __name__ == "__main__":
    main()
