# SPDX-License-Identifier: BSD-3-Clause
"""Trains an image classifier with Hugging Face Accelerate. A second start resumes.

    pip install accelerate scikit-learn rich
    torchrun --nproc-per-node 2 examples/with_accelerate.py

Accelerate uses the process group that exists. It would create none with a backend that it does not
know. On GPUs the backend is "cpu:gloo,cuda:powersgd", without cpu=True.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from summary import summary
from torch.utils.data import DataLoader, TensorDataset
from train_digits import DigitNet, read_digits

from torch_powersgd.integrations.accelerate import attach


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("cpu:powersgd")  # before the Accelerator
    accelerator = Accelerator(cpu=True)

    torch.manual_seed(0)
    model = DigitNet(channels=32, width=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    training, _ = read_digits()
    batches = DataLoader(TensorDataset(*training), batch_size=32, shuffle=True)
    ddp, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    attach(accelerator, ddp)
    if args.folder.exists():
        accelerator.load_state(str(args.folder))

    for _ in range(args.epochs):
        for pictures, labels in batches:
            loss = ddp(pictures, labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(args.folder))
    mean = accelerator.gather(loss.detach()).mean()
    accelerator.print(summary(float(mean)))
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, help="epochs of this start (3)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/with_accelerate"), help="folder to save to"
    )
    main(parser.parse_args())
