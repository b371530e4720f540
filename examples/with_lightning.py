# SPDX-License-Identifier: BSD-3-Clause
"""Trains an image classifier with Lightning. A second start resumes.

    pip install lightning scikit-learn rich
    torchrun --nproc-per-node 2 examples/with_lightning.py

On GPUs, process_group_backend is "cpu:gloo,cuda:powersgd".
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from summary import summary
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from train_digits import DigitNet, read_digits

import torch_powersgd


class Compression(lightning.Callback):
    """Attaches the DDP module when the strategy has made it. Every checkpoint holds the state."""

    def __init__(self, options: torch_powersgd.Options) -> None:
        self.options = options
        self.state: torch_powersgd.CompressionState | None = None
        self.loaded: dict[str, Any] | None = None

    def on_train_start(self, trainer: lightning.Trainer, _: lightning.LightningModule) -> None:
        ddp = trainer.strategy.model
        assert isinstance(ddp, DistributedDataParallel)
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # "16-mixed" has one
        torch_powersgd.attach(ddp, self.options, scaler=scaler)
        self.state = torch_powersgd.CompressionState(ddp)
        if self.loaded:
            self.state.load_state_dict(self.loaded)

    # Lightning saves callbacks on all ranks, and loads them before it wraps the module.
    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict() if self.state else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = DigitNet(channels=32, width=256)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(*batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main(args: argparse.Namespace) -> None:
    lightning.seed_everything(0)
    training, _ = read_digits()
    batches = DataLoader(TensorDataset(*training), batch_size=32, shuffle=True)
    options = torch_powersgd.Options.recommended()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="cpu:powersgd"),
        callbacks=[Compression(options), ModelCheckpoint(args.folder, save_last=True)],
        gradient_clip_val=1.0,
        max_epochs=args.epochs,
        logger=False,
    )
    last = args.folder / "last.ckpt"
    trainer.fit(Digits(), batches, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        print(summary(float(trainer.callback_metrics["loss"])))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="epochs of all starts together (3)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/with_lightning"), help="folder to save to"
    )
    main(parser.parse_args())
