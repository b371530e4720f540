# SPDX-License-Identifier: BSD-3-Clause
"""Trains an image classifier with Lightning. A second start resumes.

    pip install lightning scikit-learn rich
    torchrun --nproc-per-node 2 examples/with_lightning.py

The strategy chooses the backend by the accelerator, on GPUs "cpu:gloo,cuda:powersgd".
"""

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from summary import summary
from torch.utils.data import DataLoader, TensorDataset
from train_digits import DigitNet, read_digits

from torch_powersgd.integrations.lightning import PowerSGDStrategy


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
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PowerSGDStrategy(),
        callbacks=[ModelCheckpoint(args.folder, save_last=True)],
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
