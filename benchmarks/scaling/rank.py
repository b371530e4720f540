# SPDX-License-Identifier: BSD-3-Clause
"""One process of a run. It starts, attaches, takes steps, and measures what they cost.

The model has parameters but computes nothing, and its gradients are random numbers. Nothing reads
or writes the parameters, so the system gives them no memory.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import process
import torch
import torch.distributed as dist
from groups import default_group, tcp_store
from launcher.ranks import Rank
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from scaling.settings import EXACT_STEPS, RANK, Setting

STEPS = 2  # counted
_COLLECTIVE_SECONDS = 300


class _Drawn(torch.autograd.Function):
    """A scalar whose gradient with respect to the parameter is random."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = parameter.shape, parameter.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        return torch.empty(ctx.shape, dtype=ctx.dtype).uniform_(-1, 1)


class Model(nn.Module):
    """Parameters of these shapes. forward() returns a loss whose gradients are random."""

    def __init__(self, shapes: list[list[int]], dtype: torch.dtype) -> None:
        super().__init__()
        tensors = (torch.empty(shape, dtype=dtype) for shape in shapes)
        self.weights = nn.ParameterList(map(nn.Parameter, tensors))

    def forward(self) -> Tensor:
        apply = cast(Callable[[Tensor], Tensor], _Drawn.apply)
        return torch.stack([apply(weight) for weight in self.weights]).sum()


class Counter:
    """A file that only counts the bytes written to it."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        """Does nothing, because there is no buffer."""


class Laps:
    """The wall-clock and CPU seconds of consecutive parts of a run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.processor: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        self._wall, self._processor = time.monotonic(), time.process_time()

    def end(self, name: str) -> None:
        self.seconds[name] = round(time.monotonic() - self._wall, 3)
        self.processor[name] = round(time.process_time() - self._processor, 3)
        self.start()


def measure(rank: Rank, setting: Setting, checkpoints: bool) -> dict[str, Any]:
    """Runs the rank, and returns its own figures."""
    torch.manual_seed(rank.number)
    store = tcp_store(rank.folder, rank.number)
    before, laps = process.touched_memory(), Laps()
    with default_group(
        "gloo" if setting.options is None else "cpu:powersgd",
        store=store,
        rank=rank.number,
        world_size=rank.world,
        timeout=timedelta(seconds=_COLLECTIVE_SECONDS),
    ):
        laps.end("init")
        # The DDP module is destroyed before the group, or plain Gloo may hang.
        result = _trained(setting, checkpoints, laps, store.port)
    result["memory_bytes"] -= before
    return result


def _trained(setting: Setting, checkpoints: bool, laps: Laps, store_port: int) -> dict[str, Any]:
    """The figures of a DDP module, which is destroyed at the end."""
    cap: dict[str, Any] = {} if setting.cap is None else {"bucket_cap_mb": setting.cap}
    model = Model(setting.shapes, getattr(torch, setting.dtype))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False, **cap)
    laps.start()
    compression = _attach(ddp, setting)
    laps.end("attach")
    for _ in range(2 + EXACT_STEPS):  # after two compressed ones, receives are posted ahead
        step(ddp)
    dist.barrier()
    result = {
        "seconds": laps.seconds,
        "processor_seconds": laps.processor,
        "store_bytes": process.bytes_to_port(store_port),
        "memory_bytes": process.touched_memory(),
        "threads": len(process.threads()),
        "sockets": len(process.sockets()),
        **_steps(ddp, setting, compression),
    }
    if checkpoints and compression is not None:
        result |= _checkpoints(compression)
    return result


def _attach(ddp: DistributedDataParallel, setting: Setting) -> tp.Compression | None:
    if setting.options is not None:
        return tp.attach(ddp, setting.options)
    if setting.method == "hook":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=EXACT_STEPS
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def step(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad(set_to_none=True)
    ddp().backward()


def _steps(
    ddp: DistributedDataParallel, setting: Setting, compression: tp.Compression | None
) -> dict[str, Any]:
    """The bytes and collectives of a step, and for this project the buckets and stages."""
    if compression is not None:
        compression.reset_stats()
    sent = process.bytes_written()
    for _ in range(STEPS):
        step(ddp)
    result: dict[str, Any] = {"wire_bytes": round((process.bytes_written() - sent) / STEPS)}
    if compression is not None:
        counts = compression.stats(residual_norms=False)
        stages = [value for name, value in counts["seconds"].items() if "reduce" not in name]
        result["stage_seconds"] = round(sum(stages) / STEPS, 5)
        result["buckets"] = (counts["compressed_calls"] + counts["exact_calls"]) // STEPS
    if setting.method == "hook":  # torch's profiler can crash in its callbacks
        return result
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step(ddp)
    names = Counts(event.name for event in profiler.events() if event.name.startswith("gloo:"))
    return {**result, "collectives": dict(sorted(names.items()))}


def _checkpoints(compression: tp.Compression) -> dict[str, int]:
    """The bytes of both checkpoints."""
    return {
        "mean_checkpoint_bytes": _saved_bytes(compression.state_dict()),
        "rank_checkpoint_bytes": _saved_bytes(compression.state_dict(per_rank=True)),
    }


def _saved_bytes(state: dict[str, Any]) -> int:
    counter = Counter()
    torch.save(state, cast(Any, counter))
    return counter.bytes
