# SPDX-License-Identifier: BSD-3-Clause
"""Times a training step of GPT-2 on one GPU, with and without the compression stages.

    python benchmarks/bench_step.py

bench_stages.py runs the stages alone. Here they run on their own stream, bucket by bucket, during
DDP's backward pass, so the times show how much they slow it down. The options are the defaults,
except for the matrix rank. There is one process, so nothing is sent. The step without stages has a
communication hook that does nothing. The variants take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from clock import Clock, device_of, name_of
from cluster import methods, models
from launcher.ranks import alone
from report import Record, add_files, provenance, recorded, show, write
from stages.contestants import Ours
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd

TURNS = 5
WARMUPS = 3
TOKENS = 128  # of the vocabulary, which the batches use


class StagesHook:
    """A DDP communication hook that runs the stages of each bucket, but not its reductions."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._options = torch_powersgd.Options(matrix_approximation_rank=rank)
        self._device = device
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._buckets: dict[tuple[torch.Size, ...], Ours] = {}  # DDP rebuilds them after a step

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        shapes = tuple(parameter.shape for parameter in bucket.parameters())
        gradient = bucket.buffer()
        if shapes not in self._buckets:
            layout = [[list(shape) for shape in shapes]]
            self._buckets[shapes] = Ours(layout, self._options, gradient.dtype, self._device)
        on_stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        devices: list[int | str | torch.device] = []
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
            on_stream, devices = torch.cuda.stream(self._stream), [self._device]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        with on_stream:
            self._buckets[shapes].run([gradient])
            done.set_result(gradient)
        return done


StagesHook.reduce.__annotations__.clear()  # DDP compares them with types; these are strings


def make_step(arguments: argparse.Namespace, rank: int | None, cap: int) -> Callable[[], None]:
    """A step of the model with the stages at this matrix rank, or without stages if None."""
    device = device_of(arguments.device)
    torch.manual_seed(0)
    model = models.TASKS[arguments.model].make().to(device)
    if rank is None:
        ddp = methods.find("ddp-alone").make(model, 0, 0).module
    else:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        ddp.register_comm_hook(StagesHook(rank, device), StagesHook.reduce)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randint(TOKENS, (2, *arguments.batch), device=device).unbind()

    def step() -> None:
        models.loss_of(ddp, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(arguments: argparse.Namespace) -> Record:
    of, device = arguments, device_of(arguments.device)
    clock = Clock(device)
    wire = str(torch_powersgd.Options().wire_dtype)
    record: Record = {
        **provenance(name_of(device)),
        **{"model": of.model, "batch": of.batch, "wire_dtype": wire},
    }
    with alone(device):
        cases = [(None, 25), *((rank, cap) for cap in of.caps for rank in of.ranks)]
        steps = {case: make_step(of, *case) for case in cases}
        for step in steps.values():
            clock.median(step, WARMUPS)
        times: dict[tuple[int | None, int], list[float]] = {case: [] for case in cases}
        for _ in range(TURNS):
            for case, step in steps.items():
                times[case].append(clock.median(step, of.repeats))
            record["results"] = [
                {"rank": rank, "bucket_cap_mb": cap, "ms": statistics.median(found)}
                for (rank, cap), found in times.items()
            ]
            write(record, of.json)
    return record


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", default="cuda", choices=["cpu", "cuda"], help="device (cuda)")
    texts = [name for name, task in models.TASKS.items() if isinstance(task, models.Text)]
    add("--model", default="gpt2", choices=texts, help="model to train (gpt2)")
    form = ("SEQUENCES", "TOKENS")
    add("--batch", nargs=2, type=int, default=[8, 512], metavar=form, help="of a step (8 512)")
    add("--ranks", nargs="+", type=int, default=[4, 16], help="matrix ranks (4 16)")
    add("--caps", nargs="+", type=int, default=[25, 100], help="DDP's bucket_cap_mb (25 100)")
    add("--repeats", type=int, default=5, help="steps per turn (5)")
    add_files(parser, "after every turn")
    return parser.parse_args(words)


def main() -> None:
    record = recorded(parse_arguments(), measure)
    rows = [
        [
            f"rank {of['rank']}" if of["rank"] else "none",
            f"{of['bucket_cap_mb']}",
            f"{of['ms']:.2f}",
        ]
        for of in record["results"]
    ]
    show(record, {"a step": (["stages", "buckets of, MB", "ms"], rows)})


if __name__ == "__main__":
    main()
