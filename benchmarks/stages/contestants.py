# SPDX-License-Identifier: BSD-3-Clause
"""The stages of this project and torch's powerSGD_hook, each on the same buckets."""

from __future__ import annotations

import math
import statistics
from typing import Any, cast

import torch
import torch.distributed as dist
from clock import Clock
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import torch_powersgd
from torch_powersgd._core import _C
from torch_powersgd.cli.footprint import Layout
from torch_powersgd.options import to_core

STAGES = ("project", "orthogonalize", "back_project", "reconstruct")


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
            _C.BucketCompressor(bucket, to_core(options), dtype, str(device)) for bucket in layout
        ]
        self.step = 0

    def run(self, gradients: list[torch.Tensor], clock: Clock | None = None) -> dict[str, Any]:
        """Runs one step. With a clock, returns the marks before and after every stage."""
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
