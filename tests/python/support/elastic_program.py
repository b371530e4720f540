# SPDX-License-Identifier: BSD-3-Clause
"""A training job for torchrun that saves now and then, resumes from there, and may be killed.

    torchrun ... elastic_program.py FOLDER KILL_AT

Rank 1 of the first start kills itself in the backward pass of step KILL_AT (-1: never), between the
gradients of its layers. Each rank writes its parameters at the end to FOLDER/result.<rank>.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp

STEPS, SAVE_EVERY = 12, 3
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 32, generator=generator)
    return inputs, inputs.sum(1, keepdim=True).sin()


def save(
    folder: Path,
    rank: int,
    step: int,
    ddp: DistributedDataParallel,
    compression: tp.Compression,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Writes under another name first, so that a killed rank leaves no half of a file."""
    state = {
        "step": step,
        "model": ddp.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "powersgd": compression.state_dict(per_rank=True),
    }
    torch.save(state, folder / f"{step}.{rank}.partial")
    (folder / f"{step}.{rank}.partial").rename(folder / f"{step}.{rank}")


def last_saved(folder: Path, world_size: int) -> int:
    """The last step that all ranks have saved; 0 if there is none."""
    complete = [
        step
        for step in range(SAVE_EVERY, STEPS, SAVE_EVERY)
        if all((folder / f"{step}.{rank}").exists() for rank in range(world_size))
    ]
    return max(complete, default=0)


def train(rank: int, folder: Path, kill_at: int = -1) -> None:
    """Trains in the default group, from the last step that is saved to the end."""
    torch.manual_seed(0)
    first = torch.nn.Linear(32, 64)
    net = torch.nn.Sequential(first, torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ddp = DistributedDataParallel(net, bucket_cap_mb=1e-3)
    compression = tp.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
    begin = last_saved(folder, dist.get_world_size())
    if begin:
        state = torch.load(folder / f"{begin}.{rank}")
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        compression.load_state_dict(state["powersgd"])
    for step in range(begin, STEPS):
        inputs, target = batch(rank, step)
        if step == kill_at and rank == 1:
            first.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(ddp(inputs), target).backward()
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            save(folder, rank, step + 1, ddp, compression, optimizer)
    weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    torch.save({"weights": weights, "began": begin}, folder / f"result.{rank}")


def main() -> None:
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("cpu:powersgd", pg_options=OPTIONS)
    train(dist.get_rank(), Path(sys.argv[1]), int(sys.argv[2]) if first_start else -1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
