# SPDX-License-Identifier: BSD-3-Clause
"""What averaging its gradients adds to a step, rehearsed on the group, for ``advise``.

As in training, one bucket after the other is averaged while a backward pass computes. In its place
stand products of matrices: they hide what the wire takes, and compete with the stages for cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

PRODUCT_SIZE = 192  # of square matrices: a fraction of a millisecond each
CALIBRATION_PRODUCTS = 50
# Where nobody says how long the backward pass takes: twice as long as averaging alone, within
# these seconds.
BACKWARD_SECONDS = (0.2, 0.4)
BUDGET_SECONDS = 4.0
REPEATS = (1, 10)
SHORTEST = 1e-6  # what is less is hidden, or lost in noise

StartAverage = Callable[[int, torch.Tensor], dist.Work]  # of one bucket, in place


class Rehearsal:
    """Steps of a model whose buckets have ``numels`` elements of float32. All is collective.

    Args:
        numels: elements of each bucket.
        device: where they are.
        backward: seconds of a backward pass. None: chosen by what is to be hidden behind it.
    """

    def __init__(
        self, numels: list[int], device: torch.device, backward: float | None = None
    ) -> None:
        self._device = device
        self._backward = backward
        self._buffers = [torch.empty(numel, device=device) for numel in numels]
        self._shares = [numel / sum(numels) for numel in numels]
        self._factor = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device)
        self._product = torch.empty_like(self._factor)
        self._multiply(CALIBRATION_PRODUCTS)  # starts threads, loads libraries
        calibration = self._timed(lambda: self._multiply(CALIBRATION_PRODUCTS))
        # The same for all, so that all have as long a backward pass.
        self._product_seconds = self._mean(calibration) / CALIBRATION_PRODUCTS

    def alone(self, start: StartAverage) -> float:
        """Seconds with nothing to hide behind; the mean of the ranks."""
        times = [self._step(start, 0.0) for _ in range(4)]  # the first two allocate
        return self._mean(statistics.mean(times[2:]))

    def added(self, start: StartAverage, alone: float) -> float:
        """Seconds by which a step is longer than its backward pass; the mean of the ranks.

        Ranks that average go in step: what they measure differs by noise.

        Args:
            start: starts to average a bucket.
            alone: what :meth:`alone` gave, or about that; the same on all ranks.
        """
        backward = self._backward
        if backward is None:
            backward = min(max(2 * alone, BACKWARD_SECONDS[0]), BACKWARD_SECONDS[1])
        repeats = int(BUDGET_SECONDS / (2 * backward + alone))
        with_average, without = [], []
        for _ in range(min(max(repeats, REPEATS[0]), REPEATS[1])):
            # In turns, so that both meet the same noise.
            with_average.append(self._step(start, backward))
            without.append(self._step(None, backward))
        seconds = statistics.median(with_average) - statistics.median(without)
        return max(self._mean(seconds), SHORTEST)

    def _step(self, start: StartAverage | None, backward: float) -> float:
        for buffer in self._buffers:
            buffer.normal_()

        def run() -> None:
            works = []
            for bucket, buffer in enumerate(self._buffers):
                self._multiply(round(self._shares[bucket] * backward / self._product_seconds))
                if start is not None:
                    works.append(start(bucket, buffer))
            for work in works:
                work.wait()

        return self._timed(run)

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._factor, self._factor, out=self._product)

    def _mean(self, seconds: float) -> float:
        total = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def _timed(self, body: Callable[[], None]) -> float:
        """Seconds until all ranks have ended: to wait for the slowest is not the averaging's."""
        synchronize(self._device)
        dist.barrier()
        start = time.perf_counter()
        body()
        synchronize(self._device)
        dist.barrier()
        return time.perf_counter() - start


def slowest(seconds: float, device: torch.device) -> float:
    """Of all ranks. Collective."""
    each = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    return each.item()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
