# SPDX-License-Identifier: BSD-3-Clause
"""One process of a method. It trains for a number of steps whenever it is told to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from launcher import hosts
from launcher.ranks import Rank

from cluster import models
from cluster.methods import Contender
from torch_powersgd._core import _C
from torch_powersgd.options import to_core

GROUP_SECONDS = 120  # limit of a collective


@dataclass(frozen=True)
class Job:
    """What the processes of a method train.

    Attributes:
        contender: the method, and its matrix rank.
        model: the name of the model.
        device: "cpu" or "cuda".
        seed: the seed of the weights, the batches and the random start.
    """

    contender: Contender
    model: str
    device: str
    seed: int = 0


def train(rank: Rank, job: Job) -> None:
    """Reads numbers of steps from the pipe and takes that many, until the pipe is closed.

    Writes the time and the loss of each step, and the counters after each number.
    """
    with group(rank, job.contender, job.device, job.seed), suppress(EOFError):
        trainer = Trainer(rank, job)
        while True:
            trainer.turn(rank.pipe.recv(), rank.pipe.send)


def group(rank: Rank, contender: Contender, device: str, seed: int) -> AbstractContextManager[None]:
    """A context with the default group of the method."""
    if contender.how.one_level:
        os.environ["POWERSGD_HOST"] = f"the host of rank {rank.number}"
    return rank.group(contender.how.backend[device], GROUP_SECONDS, contender.options(seed))


class Trainer:
    """A model in training.

    Attributes:
        device: the model's.
        mark: called with the name of each part of a step, when that begins.
    """

    mark: Callable[[str], None]

    def __init__(self, rank: Rank, job: Job) -> None:
        torch.manual_seed(job.seed)
        self.mark = lambda part: None
        self.device = torch.device(job.device, 0) if job.device == "cuda" else torch.device("cpu")
        task = models.TASKS[job.model]
        self._model = task.make().to(self.device)
        self._options = job.contender.options(job.seed)
        self._trainee = job.contender.make(self._model, job.seed)
        self._batches = task.data(rank.number, rank.world, job.seed)
        self._optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=5e-4, betas=(0.9, 0.95), fused=True
        )
        self._rising = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / 20)
        )
        self._optimizer = self._trainee.optimized_by(self._optimizer)
        self._done = 0  # steps

    def turn(self, steps: int, write: Callable[[dict[str, Any]], None]) -> None:
        bytes_before = hosts.sent_bytes()  # while no other rank of the host sends
        self._meet()
        for _ in range(steps):
            batch = [tensor.to(self.device) for tensor in self._batches(self._done)]
            began = time.perf_counter()
            loss = self._step(batch)
            self._synchronize()
            write({"ms": (time.perf_counter() - began) * 1e3, "loss": loss})
            self._done += 1
        self._meet()
        on_gpu = self.device.type == "cuda"
        if on_gpu:  # All methods share the GPU, and one runs at a time.
            torch.cuda.empty_cache()
        write(
            {
                "tx_bytes": hosts.sent_bytes() - bytes_before,
                "gradient_bytes": sum(p.nbytes for p in self._model.parameters()),
                "payload_bytes": self._payload_bytes(),
                "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
                "device": torch.cuda.get_device_name() if on_gpu else None,
            }
        )

    def _payload_bytes(self) -> int | None:
        """The bytes of the payloads of a step on one rank, without counts and padding."""
        if not self._options or not self._trainee.compression:
            return None
        shapes = [list(parameter.shape) for parameter in self._model.parameters()]
        return _C.content_bytes(shapes, to_core(self._options), torch.float32)

    def _step(self, batch: list[torch.Tensor]) -> float:
        self.mark("forward")
        loss = models.loss_of(self._trainee.module, batch)
        self.mark("backward")
        loss.backward()
        self.mark("optimizer")
        with self._trainee.averaged():
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
        self._trainee.clear()
        self._rising.step()
        self.mark("end")
        return float(loss.detach())

    def _meet(self) -> None:
        """Waits for all ranks."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
