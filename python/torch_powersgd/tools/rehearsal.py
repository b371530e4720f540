# SPDX-License-Identifier: BSD-3-Clause
"""Steps of DDP, rehearsed on the group for ``advise``.

As in training, one bucket after the other is averaged while a backward pass computes. Products of
matrices stand in for that pass: they hide the time on the wire, and compete with the stages for
cores. DDP's own copies between gradients and buckets are not in it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

PRODUCT_SIZE = 192  # rows of square matrices, whose product takes a fraction of a millisecond
CALIBRATION_PRODUCTS = 20
CALIBRATIONS = 7
BUDGET_SECONDS = 40.0  # for all passes
PASSES = (4, 8)
BLOCK_SECONDS = 0.75  # for one setting in one pass
BLOCK_STEPS = (1, 4)
WARM_UP_STEPS = 2  # the first steps allocate
TIMED_STEPS = (3, 20)
TIMED_SECONDS = 5.0

StartAverage = Callable[[int, torch.Tensor], dist.Work]  # averages one bucket in place
Report = Callable[[int, int], None]  # takes the number of blocks that are done, and of all blocks


@dataclass(frozen=True)
class Rehearsed:
    """One way to average.

    Attributes:
        prepare: a function that makes the one that starts to average a bucket. None stands for no
            averaging.
        allocates: whether the first steps after ``prepare`` allocate, so that they are not typical.
    """

    prepare: Callable[[], StartAverage | None]
    allocates: bool


@dataclass(frozen=True)
class UserStep:
    """The seconds of a user's own step, in its backward pass and in all the rest."""

    backward: float
    rest: float = 0.0


class Rehearsal:
    """Steps of a model whose buckets have ``numels`` elements. All methods are collective.

    Args:
        numels: the elements of each bucket.
        device: the device of the gradients.
        backward: the seconds of a backward pass.
        dtype: the dtype of the gradients.
    """

    def __init__(
        self,
        numels: list[int],
        device: torch.device,
        backward: float,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._device = device
        self._backward = backward
        self._gradients = [torch.randn(numel, device=device, dtype=dtype) for numel in numels]
        self._buffers = [torch.empty_like(gradient) for gradient in self._gradients]
        self._shares = [numel / sum(numels) for numel in numels]
        self._factor = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device)
        self._product = torch.empty_like(self._factor)
        self._multiply(CALIBRATION_PRODUCTS)  # starts threads, loads libraries
        times = [
            self._timed(lambda: self._multiply(CALIBRATION_PRODUCTS)) for _ in range(CALIBRATIONS)
        ]
        # The ranks agree on it, so that all of them compute as many products.
        product = self._mean([statistics.median(times)])[0] / CALIBRATION_PRODUCTS
        self._products = [round(share * backward / product) for share in self._shares]

    def measure(
        self,
        settings: Sequence[Rehearsed],
        budget: float = BUDGET_SECONDS,
        report: Report = lambda done, blocks: None,
    ) -> list[list[list[float]]]:
        """The seconds of each step, as means over the ranks, by setting and pass.

        Every pass visits all settings, one after the other, so that all of them share the noise
        of the machines. Only one setting at a time holds memory.

        Args:
            settings: the ways to average.
            budget: the seconds for all passes. The least number of passes may take longer.
            report: a function that is called after each block of steps.
        """
        samples: list[list[list[float]]] = [[] for _ in settings]
        steps: list[int] = [0 for _ in settings]
        order = list(range(len(settings)))
        passes, done = PASSES[0], 0
        start = time.perf_counter()
        for i in range(PASSES[1]):
            # Back and forth, so that a steady drift of the machines favors no setting.
            for index in order if i % 2 == 0 else order[::-1]:
                average = settings[index].prepare()
                if i == 0 or settings[index].allocates:
                    alone = self._warm_up(average)
                    steps[index] = steps[index] or self._steps_of(alone)
                samples[index].append([self._step(average) for _ in range(steps[index])])
                done += 1
                report(done, passes * len(settings))
            if i == 0:
                (seconds,) = self._mean([time.perf_counter() - start])
                passes = min(max(int(budget / seconds), PASSES[0]), PASSES[1])
            if i + 1 == passes:
                break
        return [[self._mean(block) for block in blocks] for blocks in samples]

    def _warm_up(self, average: StartAverage | None) -> float:
        """The seconds of a step that computes nothing, as a mean over the ranks."""
        if average is None:
            return 0.0
        seconds = [self._step(average, computes=False) for _ in range(WARM_UP_STEPS)]
        return self._mean(seconds)[-1]

    def _steps_of(self, alone: float) -> int:
        """The number of steps of a block."""
        steps = round(BLOCK_SECONDS / max(alone, self._backward, 1e-3))
        return min(max(steps, BLOCK_STEPS[0]), BLOCK_STEPS[1])

    def _step(self, average: StartAverage | None, computes: bool = True) -> float:
        if average is not None:
            for buffer, gradient in zip(self._buffers, self._gradients, strict=True):
                buffer.copy_(gradient)

        def run() -> None:
            works = []
            for bucket, buffer in enumerate(self._buffers):
                if computes:
                    self._multiply(self._products[bucket])
                if average is not None:
                    works.append(average(bucket, buffer))
            for work in works:
                work.wait()

        return self._timed(run)

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._factor, self._factor, out=self._product)

    def _mean(self, seconds: list[float]) -> list[float]:
        total = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        means: list[float] = (total / dist.get_world_size()).tolist()
        return means

    def _timed(self, body: Callable[[], None]) -> float:
        """The seconds until all ranks have ended. A step of DDP waits for the slowest rank too."""
        synchronize(self._device)
        dist.barrier()
        start = time.perf_counter()
        body()
        synchronize(self._device)
        dist.barrier()
        return time.perf_counter() - start


def time_step(
    step: Callable[[], object], clear: Callable[[], None], device: torch.device, steps: int
) -> UserStep:
    """Times a user's step on this rank: the medians of its backward pass and of all the rest.

    Args:
        step: a function that runs one forward and one backward pass.
        clear: a function that runs before each step, untimed.
        device: the device on which the step computes.
        steps: the number of steps.

    Raises:
        ValueError: if the step runs no backward pass.
    """
    backward, rest = [], []
    for _ in range(steps):
        clear()
        spent: list[float] = []
        synchronize(device)
        start = time.perf_counter()
        with _timed_backward(spent, device):
            step()
        synchronize(device)
        whole = time.perf_counter() - start
        if not spent:
            raise ValueError("the step must call backward() on its loss, and it did not")
        backward.append(sum(spent))
        rest.append(whole - sum(spent))
    return UserStep(statistics.median(backward), statistics.median(rest))


@contextlib.contextmanager
def _timed_backward(spent: list[float], device: torch.device) -> Iterator[None]:
    """Appends the seconds of each backward pass. Tensor.backward calls torch.autograd.backward."""
    original = torch.autograd.backward

    def timed(*arguments: Any, **keywords: Any) -> None:
        synchronize(device)
        start = time.perf_counter()
        original(*arguments, **keywords)
        synchronize(device)
        spent.append(time.perf_counter() - start)

    torch.autograd.backward = timed
    try:
        yield
    finally:
        torch.autograd.backward = original


def slowest(
    seconds: Sequence[float], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[float]:
    """The largest of all ranks', element by element. Collective."""
    each = torch.tensor(list(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(each, dist.ReduceOp.MAX, group=group)
    values: list[float] = each.tolist()
    return values


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
