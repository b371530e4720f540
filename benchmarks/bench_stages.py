# SPDX-License-Identifier: BSD-3-Clause
"""Times the four compression stages, next to torch's powerSGD_hook and the device's copy speed.

    python benchmarks/bench_stages.py --models resnet18 demo --ranks 4
    python benchmarks/bench_stages.py --device cuda --models resnet50 gpt2 llama --ranks 4 16 64

The options are the defaults, so the stages include the conversion of the factors to int8 and back.
With --wire float32 they are those of torch's hook.

It runs in one process, without a network, and times three things on the same buckets: the stages of
this project, separately and together; torch's whole powerSGD_hook in a group of one process, whose
all-reduces send nothing; and the floor. The floor is the time to read and write the bytes that a
step cannot do without, at the device's copy speed.

On a GPU, "all" and "hook" start on an idle device and include the launches. The stages and "queued"
are timed while the host is ahead of the device, as it is in a backward pass. "launches" counts this
project's kernels. torch's hook launches many more and waits for each bucket, so most of its time is
the host's. It is compared twice:

    host  the time until the call returns, from an idle device on
    GPU   the time in which the device runs a kernel or copies, without the gaps between them
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from dataclasses import dataclass

import shapes
import torch
import torch.distributed as dist
from clock import Clock, PeakMemory, gpu_ms, host_ms
from launcher.ranks import default_group
from report import Record, add_files, in_turn, processor, provenance, recorded, show, write
from stages.contestants import Hook, Ours
from stages.tables import results

import torch_powersgd
from torch_powersgd._core import _C
from torch_powersgd.cli.footprint import Layout, buckets_of
from torch_powersgd.option_values import dtype_name

COPIED_BYTES = 1 << 30  # on a GPU, to measure its copy speed


@dataclass(frozen=True)
class Case:
    """One configuration that is measured."""

    model: str
    options: torch_powersgd.Options
    dtype: torch.dtype
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def layout(self) -> Layout:
        return buckets_of([list(shape) for shape in shapes.MODELS[self.model]()], self.dtype)

    def title(self) -> str:
        return f"{self.model}, rank {self.options.matrix_approximation_rank}, {self.dtype}"

    def ours(self) -> Ours:
        return Ours(self.layout, self.options, self.dtype, self.device)

    def hook(self) -> Hook:
        return Hook(self.layout, self.options.matrix_approximation_rank)


class Gradients:
    """Random gradients of every bucket, which the stages overwrite."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        sizes = [sum(math.prod(shape) for shape in bucket) for bucket in case.layout]
        self.numel = sum(sizes)
        self._sources = [torch.randn(n, device=case.device).to(case.dtype) for n in sizes]
        self.tensors = [source.clone() for source in self._sources]

    def refill(self) -> None:
        """Restores the gradients."""
        for gradient, source in zip(self.tensors, self._sources, strict=True):
            gradient.copy_(source)

    def warm_up(self, contestant: Ours | Hook) -> None:
        """Runs the first steps, which allocate. The hook's first two do not compress."""
        for _ in range(3):
            self.refill()
            contestant.run(self.tensors)


def copy_bytes_per_ms(gradients: Gradients, clock: Clock, repeats: int) -> float:
    """The bytes that the device reads and writes per millisecond when it copies.

    A GPU copies one large tensor: copies of small buckets leave gaps between their launches.
    """
    if not gradients.tensors[0].is_cuda:
        nbytes = sum(gradient.nbytes for gradient in gradients.tensors)
        return 2 * nbytes / clock.median(gradients.refill, repeats)
    source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    return 2 * COPIED_BYTES / clock.median(lambda: copy.copy_(source), repeats, ahead=True)


def bench(case: Case, repeats: int) -> Record:
    clock = Clock(case.device)
    gradients = Gradients(case)

    def measure(contestant: Ours | Hook, repeats: int) -> dict[str, float]:
        memory = PeakMemory(case.device)
        gradients.warm_up(contestant)
        step = functools.partial(contestant.run, gradients.tensors)
        result = {"ms": clock.median(step, repeats, gradients.refill)}
        result["memory_bytes"] = memory.bytes()
        if case.on_gpu:
            result["host_ms"] = host_ms(step, repeats, gradients.refill)
            result["gpu_ms"] = gpu_ms(step, max(3, repeats // 5))
        return result

    ours = case.ours()
    ours_result = measure(ours, repeats)
    step = functools.partial(ours.run, gradients.tensors)
    ours_result["queued_ms"] = clock.median(step, repeats, gradients.refill, ahead=True)
    stage_ms = ours.stage_ms(clock, gradients.tensors, repeats, gradients.refill)
    launched = _C.cuda_launch_count()
    step()
    ours_result["launches"] = _C.cuda_launch_count() - launched
    hook_result = measure(case.hook(), max(3, repeats // 3))
    copied_per_ms = copy_bytes_per_ms(gradients, clock, repeats)
    gradient_bytes = sum(compressor.gradient_bytes for compressor in ours.buckets)
    result: Record = {
        "model": case.model,
        "rank": case.options.matrix_approximation_rank,
        "dtype": dtype_name(case.dtype),
        "residual_dtype": dtype_name(case.options.residual_dtype),
        "wire_dtype": dtype_name(case.options.wire_dtype or torch.float32),
        "elements": gradients.numel,
        "buckets": len(ours.buckets),
        "gradient_bytes": gradient_bytes,
        "stage_ms": stage_ms,
        "ours": ours_result,
        "hook": hook_result,
        "copy_gbyte_per_s": copied_per_ms / 1e6,
        "hook_over_ours": hook_result["ms"] / ours_result["ms"],
    }
    result.update(_by_device(result))
    result["floor_ms"] = floor_bytes(case, gradients.numel) / copied_per_ms
    result["ours_over_floor"] = ours_result["queued_ms"] / result["floor_ms"]
    return result


def floor_bytes(case: Case, elements: int) -> int:
    """The bytes that the stages of a step cannot avoid to read and write.

    project reads the gradient and the residual's memory and writes the memory, back_project reads
    the memory, reconstruct writes the gradient. benchmarks/kernels/cases.h has the same definition.
    """
    residual = getattr(torch, dtype_name(case.options.residual_dtype))
    return elements * (2 * case.dtype.itemsize + 3 * int(residual.itemsize))


def _by_device(r: Record) -> dict[str, float]:
    """The factors on a GPU, and on a CPU the bus bandwidth below which compression pays off."""
    ours, hook = r["ours"], r["hook"]
    if "gpu_ms" in ours:
        times = (time for time in ("host_ms", "gpu_ms") if ours[time])
        return {f"hook_over_ours_{time}": hook[time] / ours[time] for time in times}
    # An all-reduce moves 2 bytes(G).
    return {"break_even_gbyte_per_s": 2 * r["gradient_bytes"] / (ours["queued_ms"] * 1e-3) / 1e9}


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", default="cpu", choices=["cpu", "cuda"], help="device (cpu)")
    add("--models", nargs="+", default=["resnet18", "demo"], choices=shapes.MODELS)
    add("--ranks", nargs="+", type=int, default=[4], help="matrix ranks (4)")
    add(
        "--dtypes",
        nargs="+",
        default=["float32"],
        metavar="GRADIENT[/RESIDUAL]",
        help="dtypes of the gradients and of the residuals (float32/float32)",
    )
    add("--wire", default="int8", choices=["int8", "float32"], help="of the factors (int8)")
    add("--threads", type=int, default=1, help="number of CPU threads (1)")
    add("--repeats", type=int, default=15, help="number of timed steps (15)")
    add_files(parser, "after every configuration")
    return parser.parse_args(words)


def cases_of(arguments: argparse.Namespace, device: torch.device) -> list[Case]:
    cases = []
    for model, dtype, rank in itertools.product(
        arguments.models, arguments.dtypes, arguments.ranks
    ):
        gradient, _, residual = dtype.partition("/")
        options = torch_powersgd.Options(
            matrix_approximation_rank=rank,
            residual_dtype=getattr(torch, residual or "float32"),
            wire_dtype=None if arguments.wire == "float32" else arguments.wire,
        )
        cases.append(Case(model, options, getattr(torch, gradient), device))
    return cases


def measure(arguments: argparse.Namespace) -> Record:
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    record: Record = {**provenance(name), "threads": arguments.threads, "results": []}
    backend = "nccl" if device.type == "cuda" else "gloo"
    with default_group(backend, store=dist.HashStore(), rank=0, world_size=1):
        for case in in_turn(cases_of(arguments, device), Case.title):
            record["results"].append(bench(case, arguments.repeats))
            write(record, arguments.json)
    return record


def main() -> None:
    record = recorded(parse_arguments(), measure)
    show(record, {"ms per step; launches per bucket; peak memory / gradient": results(record)})


if __name__ == "__main__":
    main()
