# SPDX-License-Identifier: BSD-3-Clause
"""One process of a trial, as an ordinary training program, which may kill itself at a stage.

It reports a digest of its parameters after every step, and its error, if any. After an error,
processes of even rank destroy their group, and those of odd rank just exit.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from launcher import hosts
from launcher.ranks import Rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from reliability.cases import AIMED, EXACT, EXACT_STEPS, FAULT_STEP, IN_STATE_DICT, Case

PORT = 29500  # of rank 0's host, which is its own
LAYERS, WIDTH = 4, 256
PAUSE = 0.01  # seconds between two steps


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Returns a hash of the bits of all tensors, which must be on the CPU."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def train(rank: Rank, case: Case, method: str, timeout: float) -> None:
    """Trains, and exits as a program does, with destructors, which may crash."""
    try:
        _Training(rank, case, method, timeout).run()
    except Exception as error:
        lines = str(error).splitlines() or [""]
        rank.pipe.send(("error", f"{type(error).__name__}: {lines[0]}"))
        rank.pipe.send(("error_time", time.monotonic()))
        if rank.number % 2 == 0 and dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook(*sys.exc_info())
        # Inside except, where the error keeps objects alive, as in a program.
        ctypes.pythonapi.Py_Exit(1)
    ctypes.pythonapi.Py_Exit(0)


class _Training:
    def __init__(self, rank: Rank, case: Case, method: str, timeout: float) -> None:
        self.rank, self.case, self.timeout = rank, case, timeout
        self.stage = case.stage if rank.number == case.victim else ""  # "": it is not killed
        self.plain = method == "plain"

    def run(self) -> None:
        rank, case = self.rank, self.case
        self._join_group()
        ddp, compression = self._model()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
        generator = torch.Generator().manual_seed(rank.number)
        fault_step = EXACT_STEPS // 2 if case.stage == EXACT else FAULT_STEP
        for step in range(case.steps):
            if step == fault_step:
                if case.stage in AIMED:
                    rank.pipe.recv()  # the message that the links are slow
                self._prepare_kill(ddp.module, optimizer)
                if case.stage == IN_STATE_DICT:
                    self._checkpoint(ddp, compression)
            time.sleep(PAUSE)
            optimizer.zero_grad()
            inputs = torch.randn(8, WIDTH, generator=generator)
            (ddp(inputs) - inputs.roll(1, dims=1)).square().mean().backward()
            optimizer.step()
            rank.pipe.send(("digest", digest(ddp.parameters())))
        dist.barrier()
        del ddp  # plain Gloo may hang otherwise
        dist.destroy_process_group()

    def _join_group(self) -> None:
        limit = timedelta(seconds=self.timeout)
        number, world = self.rank.number, self.rank.world
        # Rank 0 waits for the others, as under torchrun.
        store = dist.TCPStore("10.77.0.1", PORT, world, is_master=number == 0, timeout=limit)
        if self.stage == "in init_process_group":
            for module in (dist, dist.distributed_c10d):
                module.ProcessGroupGloo = self._die  # type: ignore[attr-defined]
        backend = "gloo" if self.plain else "cpu:powersgd"
        dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=limit)

    def _model(self) -> tuple[Any, tp.Compression | None]:
        """The DDP module, and its compression if the method is ours."""
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        if self.stage == "in attach":
            if self.plain:
                self._die()  # the others wait in DDP's constructor
            tp.collective_call.CollectiveCall.agree = self._die  # type: ignore[method-assign]
        # Otherwise each layer has a bucket.
        cap = 25.0 if self.case.one_bucket else WIDTH * WIDTH * 4 / 2**20
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap)
        options = tp.Options(start_powerSGD_iter=EXACT_STEPS)
        return ddp, None if self.plain else tp.attach(ddp, options)

    def _die(self, *_: Any, **__: Any) -> None:
        self.rank.pipe.send(("fault_time", time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def _die_after(self, count: int) -> None:
        """Kills this process once its host has sent `count` more bytes."""
        limit = hosts.sent_bytes() + count

        def watch() -> None:
            while hosts.sent_bytes() < limit:
                time.sleep(1e-3)
            self._die()

        threading.Thread(target=watch, daemon=True).start()

    def _prepare_kill(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        # The bytes of P, or Q, that a process sends in a step: its own and those it forwards. TCP
        # and biases add a quarter.
        payload = (self.rank.world - 1) * LAYERS * WIDTH * 16
        if self.stage == "before its forward pass":
            self._die()
        elif self.stage == "while P is on its way":
            self._die_after(payload // 2)
        elif self.stage == "while q is on its way":
            self._die_after(payload * 19 // 10)
        elif self.stage == IN_STATE_DICT:
            self._die_after(WIDTH * WIDTH)  # a fraction of the residual
        elif self.stage in ("in backward, between buckets", EXACT):
            # The buckets of later layers are in flight when this gradient is ready.
            model[1].weight.register_hook(self._die)
        elif self.stage == "in optimizer.step":
            optimizer.register_step_pre_hook(self._die)

    def _checkpoint(self, ddp: Any, compression: tp.Compression | None) -> None:
        """Takes a checkpoint on all ranks, during which one is killed."""
        if compression is not None:
            compression.state_dict()
        else:
            ddp.state_dict()  # not a collective call
            if self.stage:
                self._die()
            dist.barrier()
