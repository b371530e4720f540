# SPDX-License-Identifier: BSD-3-Clause
"""Trains an image classifier with Ray Train on two workers. A second start resumes.

    pip install 'ray[train]' scikit-learn rich
    python examples/with_ray.py

The backend of the configuration serves CPUs and GPUs. ScalingConfig(use_gpu=True) takes the latter.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from summary import summary
from torch.utils.data import DataLoader, TensorDataset
from train_digits import DigitNet, read_digits

import torch_powersgd
from torch_powersgd.integrations.ray import PowerSGDConfig


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = DigitNet(channels=32, width=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training, _ = read_digits()
    batches = ray.train.torch.prepare_data_loader(
        DataLoader(TensorDataset(*training), batch_size=32, shuffle=True)
    )
    ddp = ray.train.torch.prepare_model(model)
    compression = torch_powersgd.attach(ddp)

    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        compression.load_state_dict(state["powersgd"])

    for epoch in range(config["epochs"]):
        batches.sampler.set_epoch(epoch)
        for pictures, labels in batches:
            loss = ddp(pictures, labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "powersgd": compression.state_dict(),  # on all workers
        }
        report(state, loss.detach())


def report(state: dict[str, Any], loss: torch.Tensor) -> None:
    dist.all_reduce(loss)
    metrics = {"summary": summary(float(loss) / dist.get_world_size())}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None  # from rank 0 alone, as its state is that of all
        if dist.get_rank() == 0:
            torch.save(state, Path(folder, "state.pt"))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report(metrics, checkpoint=checkpoint)


def main(args: argparse.Namespace) -> None:
    folder = args.folder.resolve()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        torch_config=PowerSGDConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        # Ray goes on from the last checkpoint of a run with this name.
        run_config=RunConfig(name=folder.name, storage_path=str(folder.parent)),
    )
    print(trainer.fit().metrics["summary"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="epochs of this start (3)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/with_ray"), help="folder to save to"
    )
    main(parser.parse_args())
