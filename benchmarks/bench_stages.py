# SPDX-License-Identifier: BSD-3-Clause
"""Times the four compression stages, next to torch's powerSGD_hook and the device's copy speed.

    python benchmarks/bench_stages.py --models resnet18 demo --ranks 4
    python benchmarks/bench_stages.py --device cuda --models resnet50 gpt2 llama --ranks 4 16 64

The options are the defaults, so the stages include the conversion of the factors to int8 and back.
With --wire float32 they are those of torch's hook.

It runs in one process, on one core, without a network, and times three things on the same buckets:
the stages of this project, separately and together; torch's whole powerSGD_hook in a group of one
process, whose all-reduces send nothing; and the floor. The floor is the time to read and write the
bytes that a step cannot do without, at the device's copy speed. The break-even is the bandwidth
above which a plain all-reduce is faster.

On a GPU, "all" and "hook" start on an idle device and include the launches. The stages and "queued"
are timed while the host is ahead of the device, as it is in a backward pass. torch's hook launches
many more kernels and waits for each bucket, so most of its time is the host's. It is compared
twice:

    host  the time until the call returns, from an idle device on
    GPU   the time in which the device runs a kernel or copies, without the gaps between them
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math

import shapes
import torch
from clock import Clock, device_of, gpu_ms, host_ms, is_gpu, name_of
from launcher.ranks import alone
from report import Record, add_files, in_turn, provenance, recorded, show, write
from stages.contestants import Hook, Ours
from stages.tables import results

import torch_powersgd
from torch_powersgd.cli.footprint import Layout, buckets_of

COPIED_BYTES = 1 << 30  # on a GPU, to measure its copy speed


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration that is measured. Its dtypes are named as in torch."""

    model: str
    rank: int
    dtype: str
    residual_dtype: str
    wire_dtype: str

    @property
    def options(self) -> torch_powersgd.Options:
        return torch_powersgd.Options(
            matrix_approximation_rank=self.rank,
            residual_dtype=getattr(torch, self.residual_dtype),
            wire_dtype=None if self.wire_dtype == "float32" else self.wire_dtype,
        )

    def title(self) -> str:
        return f"{self.model}, rank {self.rank}, {self.dtype}"


class Gradients:
    """Random gradients of every bucket, which the stages overwrite."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        torch.manual_seed(0)
        sizes = [sum(math.prod(shape) for shape in bucket) for bucket in layout]
        self._sources = [torch.randn(n, device=device).to(dtype) for n in sizes]
        self.tensors = [source.clone() for source in self._sources]

    def refill(self) -> None:
        """Restores the gradients."""
        for gradient, source in zip(self.tensors, self._sources, strict=True):
            gradient.copy_(source)


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


def bench(case: Case, device: torch.device, repeats: int) -> Record:
    clock, dtype = Clock(device), getattr(torch, case.dtype)
    layout = buckets_of([list(shape) for shape in shapes.MODELS[case.model]()], dtype)
    gradients = Gradients(layout, dtype, device)
    ours = Ours(layout, case.options, dtype, device)
    step = functools.partial(ours.run, gradients.tensors)
    ours_ms = _times(device, ours, gradients, repeats)
    ours_ms["queued_ms"] = clock.median(step, repeats, gradients.refill, ahead=True)
    stage_ms = ours.stage_ms(clock, gradients.tensors, repeats, gradients.refill)
    hook_ms = _times(device, Hook(layout, case.rank), gradients, max(3, repeats // 3))
    copied_per_ms = copy_bytes_per_ms(gradients, clock, repeats)
    elements = sum(gradient.numel() for gradient in gradients.tensors)
    return {
        **dataclasses.asdict(case),
        "elements": elements,
        "buckets": len(layout),
        "gradient_bytes": sum(compressor.gradient_bytes for compressor in ours.buckets),
        "stage_ms": stage_ms,
        "ours": ours_ms,
        "hook": hook_ms,
        "copy_gbyte_per_s": copied_per_ms / 1e6,
        "floor_ms": floor_bytes(case, elements) / copied_per_ms,
    }


def _times(
    device: torch.device, contestant: Ours | Hook, gradients: Gradients, repeats: int
) -> dict[str, float]:
    """The milliseconds of a step. The first steps allocate, and the hook compresses no sooner."""
    clock, step = Clock(device), functools.partial(contestant.run, gradients.tensors)
    clock.median(step, 3, gradients.refill)
    found = {"ms": clock.median(step, repeats, gradients.refill)}
    if is_gpu(device):
        found["host_ms"] = host_ms(step, repeats, gradients.refill)
        found["gpu_ms"] = gpu_ms(step, max(3, repeats // 5))
    return found


def floor_bytes(case: Case, elements: int) -> int:
    """The bytes that the stages of a step cannot avoid to read and write.

    project reads the gradient and the residual's memory and writes the memory, back_project reads
    the memory, reconstruct writes the gradient. benchmarks/kernels/cases.h has the same definition.
    """
    gradient, residual = getattr(torch, case.dtype), getattr(torch, case.residual_dtype)
    return int(elements * (2 * gradient.itemsize + 3 * residual.itemsize))


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", default="cpu", choices=["cpu", "cuda"], help="device (cpu)")
    add("--models", nargs="+", default=["resnet18", "demo"], choices=shapes.MODELS)
    add("--ranks", nargs="+", type=int, default=[4], help="matrix ranks (4)")
    dtypes = "dtypes of the gradients and of the residuals (float32/float32)"
    form = "GRADIENT[/RESIDUAL]"
    add("--dtypes", nargs="+", default=["float32"], metavar=form, help=dtypes)
    add("--wire", default="int8", choices=["int8", "float32"], help="of the factors (int8)")
    add("--repeats", type=int, default=15, help="number of timed steps (15)")
    add_files(parser, "after every configuration")
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace) -> Record:
    torch.set_num_threads(1)
    device = device_of(arguments.device)
    record: Record = {**provenance(name_of(device)), "results": []}
    of = arguments
    cases = []
    for model, dtypes, rank in itertools.product(of.models, of.dtypes, of.ranks):
        gradient, _, residual = dtypes.partition("/")
        cases.append(Case(model, rank, gradient, residual or "float32", of.wire))
    with alone(device):
        for case in in_turn(cases, Case.title):
            record["results"].append(bench(case, device, of.repeats))
            write(record, of.json)
    return record


def main() -> None:
    record = recorded(parse_arguments(), measure)
    show(record, {"milliseconds of a step": results(record)})


if __name__ == "__main__":
    main()
