# SPDX-License-Identifier: BSD-3-Clause
"""A training job for Ray Train, whose rank 1 is killed once. The same job without Ray is beside it.

    python ray_program.py FOLDER

The workers write what they have trained to FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp

EXACT, SAVED, KILLED, STEPS = 3, 6, 8, 12
OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=EXACT, matrix_approximation_rank=2)


class Job:
    """The model and the optimizer of a rank."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)

    def train(self, ddp: DistributedDataParallel, begin: int, end: int) -> None:
        for step in range(begin, end):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            inputs = torch.randn(16, 32, generator=generator)
            self.optimizer.zero_grad()
            torch.nn.functional.mse_loss(ddp(inputs), inputs[:, :8].sin()).backward()
            self.optimizer.step()

    def weights(self) -> list[float]:
        vector = torch.nn.utils.parameters_to_vector(self.net.parameters())
        values: list[float] = vector.tolist()
        return values

    def state(self, compression: tp.Compression) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "powersgd": compression.state_dict(),
        }

    def load(self, compression: tp.Compression, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        compression.load_state_dict(state["powersgd"])


def final_weights(_: int) -> list[float]:
    """The weights after all steps, of a job that goes on from its own state at SAVED."""
    first = Job()
    ddp = DistributedDataParallel(first.net)
    compression = tp.attach(ddp, OPTIONS)
    first.train(ddp, 0, SAVED)
    state = first.state(compression)
    second = Job()
    ddp = DistributedDataParallel(second.net)
    second.load(tp.attach(ddp, OPTIONS), state)
    second.train(ddp, SAVED, STEPS)
    return second.weights()


def worker(config: dict[str, Any]) -> None:
    """The training function of a Ray worker."""
    import ray.train.torch

    rank, folder = dist.get_rank(), Path(config["folder"])
    job = Job()
    ddp = ray.train.torch.prepare_model(job.net)
    compression = tp.attach(ddp, OPTIONS)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        job.train(ddp, 0, SAVED)
        state = job.state(compression)
        with tempfile.TemporaryDirectory() as temporary:
            torch.save(state, Path(temporary, "state.pt"))
            mine = ray.train.Checkpoint.from_directory(temporary) if rank == 0 else None
            ray.train.report({}, checkpoint=mine)
        ray.train.get_all_reported_checkpoints()  # waits until Ray has stored this one
        job.train(ddp, SAVED, KILLED)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        with checkpoint.as_directory() as saved:
            job.load(compression, torch.load(Path(saved, "state.pt")))
    job.train(ddp, SAVED, STEPS)  # the rank that is not killed waits for the other one
    stats = compression.stats(residual_norms=False)
    result = {"weights": job.weights(), "stats": stats, "backend": dist.get_backend()}
    torch.save(result, folder / f"result.{rank}")


def start(config: dict[str, Any]) -> None:
    """Names nothing of the package, so that a worker does not import it with this function."""
    import ray_program

    ray_program.worker(config)


def main(folder: str) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from torch_powersgd.integrations.ray import PowerSGDConfig

    TorchTrainer(
        start,
        train_loop_config={"folder": folder},
        torch_config=PowerSGDConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=folder, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
