# SPDX-License-Identifier: BSD-3-Clause
"""The training job that is killed. It resumes from the last step that all processes have saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from bits import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from reliability.fate import RANK, WORLD, Fate, saved


class DyingFile:
    """A file that kills its process after a number of bytes has been written."""

    def __init__(self, file: IO[bytes], size: int, die: Callable[[], None]) -> None:
        self._file, self._left, self._die = file, size, die

    def write(self, data: bytes) -> int:
        self._file.write(bytes(data)[: self._left])
        self._left -= len(data)
        if self._left <= 0:
            self._file.flush()
            self._die()
        return len(data)

    def flush(self) -> None:
        self._file.flush()


def save(state: dict[str, Any], path: Path, fate: Fate) -> None:
    """Writes a checkpoint under a temporary name, and renames it once it is on disk."""
    share = fate.share()
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        if share is not None and share < 1:
            size = max(1, int(share * sum(tensor.nbytes for tensor in tensors_in(state))))
            torch.save(state, cast(IO[bytes], DyingFile(file, size, fate.die)))
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    if share == 1:
        fate.die()
    os.replace(unfinished, path)
    if share is not None:
        fate.die()


def tensors_in(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = list(state.values()) if isinstance(state, dict) else []
    return [tensor for part in parts for tensor in tensors_in(part)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    inputs = torch.randn(16, 64, generator=generator)
    return inputs, (inputs.sum(1, keepdim=True) / 8).sin()


def make() -> tuple[DistributedDataParallel, tp.Compression, torch.optim.Optimizer]:
    """The attached model, its compression and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 96), nn.Tanh()]
    # Several buckets, so that a kill finds some in the first half of a step, others in the second.
    ddp = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(96, 1)), bucket_cap_mb=0.02)
    compression = tp.attach(ddp, tp.Options(matrix_approximation_rank=4))
    return ddp, compression, torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def run(folder: Path, plan: dict[str, Any], fate: Fate) -> dict[str, Any]:
    """Trains from the last checkpoint to the end. Returns this rank's final values."""
    steps, save_every = plan["steps"], plan["save_every"]
    fate.say("joining")
    dist.init_process_group("cpu:powersgd")
    fate.say("attaching")
    ddp, compression, optimizer = make()
    by_rank = [saved(folder, rank) for rank in range(WORLD)]
    begin = max(set.intersection(*by_rank), default=0)
    losses = torch.zeros(steps, dtype=torch.float64)
    if begin:
        fate.say("loading", begin)
        state = torch.load(folder / f"{begin}.{RANK}.pt")
        compression.load_state_dict(state["powersgd"])
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses[:begin] = state["losses"]
    for step in range(begin, steps):
        fate.say("training", step)
        inputs, target = batch(step)
        loss = nn.functional.mse_loss(ddp(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
        done = step + 1
        if done % save_every == 0 and done < steps:
            fate.say("saving", step)
            state = {
                "model": ddp.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "powersgd": compression.state_dict(per_rank=True),
                "losses": losses[:done].clone(),
            }
            save(state, folder / f"{done}.{RANK}.pt", fate)
            (folder / f"{done - 2 * save_every}.{RANK}.pt").unlink(missing_ok=True)
    result = {
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "began": begin,
        "loss": f"{float(losses[-1]):.9f}",
        "losses": digest([losses]),
        "parameters": digest(ddp.parameters()),
        "state": digest(tensors_in(compression.state_dict(per_rank=True))),
    }
    fate.say("leaving")
    dist.destroy_process_group()
    return result
