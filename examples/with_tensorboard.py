# SPDX-License-Identifier: BSD-3-Clause
"""Shows in TensorBoard what compression does to each layer of an image classifier.

pip install tensorboard scikit-learn rich
torchrun --nproc-per-node 2 examples/with_tensorboard.py
tensorboard --logdir runs/with_tensorboard
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from summary import summary
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter
from train_digits import DigitNet, read_digits

import torch_powersgd

EVERY = 10  # steps


def main(args: argparse.Namespace) -> None:
    dist.init_process_group("cpu:powersgd")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(DigitNet(channels=32, width=256))
    compression = torch_powersgd.attach(ddp, matrix_approximation_rank=4)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    training, _ = read_digits()
    torch.manual_seed(dist.get_rank())  # each process draws its own batches
    batches = DataLoader(TensorDataset(*training), batch_size=32, shuffle=True)
    # Each process has its own residuals, which are much alike.
    writer = SummaryWriter(args.folder) if dist.get_rank() == 0 else None

    step = 0
    for _ in range(args.epochs):
        for pictures, labels in batches:
            loss = ddp(pictures, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if writer is not None and step % EVERY == 0:
                writer.add_scalar("loss", loss.item(), step)
                for name, value in compression.stats(flat=True, per_layer=True).items():
                    writer.add_scalar(f"powersgd/{name}", value, step)
    if writer is not None:
        writer.close()
        print(summary(loss.item()))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6, help="epochs (6)")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/with_tensorboard"), help="folder of the events"
    )
    main(parser.parse_args())
