# SPDX-License-Identifier: BSD-3-Clause
"""One rank of a run: it starts, attaches, takes steps, and counts what that costs.

The model has parameters and no computation: the gradients are random numbers. Nothing reads or
writes the parameters, so that the system gives them no memory.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter as Counts
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from groups import default_group
from local_ranks import bytes_written
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from scaling import process
from scaling.settings import EXACT_STEPS, RANK, Setting

STEPS = 2  # that are counted
_COLLECTIVE_SECONDS = 300


class _Drawn(torch.autograd.Function):
    """A scalar whose gradient by the parameter is random."""

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


def measure(rank: int, folder: Path, setting: Setting, checkpoints: bool) -> dict[str, Any]:
    """Runs the rank. All of its figures are this rank's own."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = _store(rank, folder, setting.world)
    before, laps = process.touched_memory(), process.Laps()
    with default_group(
        "gloo" if setting.options is None else "cpu:powersgd",
        store=store,
        rank=rank,
        world_size=setting.world,
        timeout=timedelta(seconds=_COLLECTIVE_SECONDS),
    ):
        laps.end("init")
        # The DDP module ends before the group: plain Gloo may hang otherwise.
        result = _trained(setting, checkpoints, laps, store.port)
    result["memory_bytes"] -= before
    return result


def _trained(
    setting: Setting, checkpoints: bool, laps: process.Laps, store_port: int
) -> dict[str, Any]:
    """The figures of a DDP module, which ends with this function."""
    cap: dict[str, Any] = {} if setting.cap is None else {"bucket_cap_mb": setting.cap}
    model = Model(setting.shapes, getattr(torch, setting.dtype))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False, **cap)
    laps.start()
    compression = _attach(ddp, setting)
    laps.end("attach")
    _step(ddp)
    laps.end("first step")
    for _ in range(EXACT_STEPS):  # the last one is compressed
        _step(ddp)
    dist.barrier()
    result = {
        "seconds": laps.seconds,
        "processor_seconds": laps.processor,
        "store_bytes": process.bytes_to_port(store_port),
        "memory_bytes": process.touched_memory(),
        **process.handles(),
        **_steps(ddp, setting, compression),
    }
    if checkpoints and compression is not None:
        result |= _checkpoints(compression)
    return result


def _store(rank: int, folder: Path, world: int) -> dist.TCPStore:
    """A store that rank 0 serves, on a port that is free."""
    file = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        part = folder / "port.part"
        part.write_text(str(store.port))
        part.replace(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    port = int(file.read_text())
    return dist.TCPStore("127.0.0.1", port, world, is_master=False, wait_for_workers=False)


def _attach(ddp: DistributedDataParallel, setting: Setting) -> tp.Compression | None:
    if setting.options is not None:
        return tp.attach(ddp, setting.options)
    if setting.method == "hook":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=EXACT_STEPS
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def _step(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad(set_to_none=True)
    ddp().backward()


def _steps(
    ddp: DistributedDataParallel, setting: Setting, compression: tp.Compression | None
) -> dict[str, Any]:
    """The bytes, seconds and collectives of a step."""
    if compression is not None:
        compression.reset_stats()
    sent, took = bytes_written(), []
    for _ in range(STEPS):
        began = time.monotonic()
        _step(ddp)
        took.append(time.monotonic() - began)
    result: dict[str, Any] = {
        "step_seconds": round(statistics.median(took), 4),
        "wire_bytes": round((bytes_written() - sent) / STEPS),
    }
    if compression is not None:
        counts = compression.stats(residual_norms=False)
        seconds = {name: round(value / STEPS, 5) for name, value in counts["seconds"].items()}
        result |= {"stage_seconds": seconds, "payload_bytes": counts["bytes_after"] // STEPS}
        result["buckets"] = (counts["compressed_calls"] + counts["exact_calls"]) // STEPS
    if setting.method == "hook":  # torch's profiler can crash on its callbacks
        return result
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        _step(ddp)
    names = Counts(event.name for event in profiler.events() if event.name.startswith("gloo:"))
    return {**result, "collectives": dict(sorted(names.items()))}


def _checkpoints(compression: tp.Compression) -> dict[str, int]:
    """The bytes of both checkpoints."""
    return {
        "mean_checkpoint_bytes": _saved_bytes(compression.state_dict()),
        "rank_checkpoint_bytes": _saved_bytes(compression.state_dict(per_rank=True)),
    }


def _saved_bytes(state: dict[str, Any]) -> int:
    counter = process.Counter()
    torch.save(state, cast(Any, counter))
    return counter.bytes
