# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small image classifier with DistributedDataParallel, with or without compression.

    torchrun --nproc-per-node 2 examples/train_digits.py --backend gloo
    torchrun --nproc-per-node 2 examples/train_digits.py --backend powersgd

The 1797 pictures of 8 x 8 are those of scikit-learn, which ships them (pip install scikit-learn).
The loop, and the lines that compression adds to it, are in training.py.
"""

import argparse

import torch
import training
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

CLASSES = 10


def options() -> argparse.ArgumentParser:
    parser = training.common_options(__doc__)
    parser.set_defaults(steps=300, batch=32, lr=0.05)
    parser.add_argument(
        "--channels", type=int, default=64, help="channels of the first convolution (64)"
    )
    parser.add_argument("--width", type=int, default=256, help="width of the hidden layer (256)")
    return parser


class DigitNet(nn.Module):
    """Three convolutions and two linear layers. forward() returns the loss."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classify = nn.Sequential(
            nn.Linear(2 * channels * 2 * 2, width), nn.ReLU(), nn.Linear(width, CLASSES)
        )

    def logits(self, pictures: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.classify(self.features(pictures))
        return result

    def forward(self, pictures: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.logits(pictures), labels)


def read_digits() -> tuple[training.Batch, training.Batch]:
    """Pictures and labels: four fifths to learn from, and one fifth to validate with."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.from_numpy(digits.images).float()[order, None] / 8 - 1  # from -1 to 1
    labels = torch.from_numpy(digits.target).long()[order]
    held_out = len(order) // 5
    return (pictures[held_out:], labels[held_out:]), (pictures[:held_out], labels[:held_out])


class DigitTrainer(training.Trainer):
    def __init__(self, args: argparse.Namespace, wrap: training.Wrap | None = None) -> None:
        torch.manual_seed(args.seed)
        self.net = DigitNet(args.channels, args.width)
        optimizer = torch.optim.SGD(
            self.net.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4
        )
        super().__init__(args, self.net, optimizer, wrap)

        (pictures, labels), self.validation = read_digits()
        self.pictures = pictures.chunk(self.world)[self.rank]
        self.labels = labels.chunk(self.world)[self.rank]

    def sample(self, generator: torch.Generator) -> training.Batch:
        chosen = torch.randint(len(self.labels), (self.args.batch,), generator=generator)
        return self.pictures[chosen], self.labels[chosen]

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The loss and the accuracy. All processes compute them: there are few pictures."""
        pictures, labels = self.validation
        logits = self.net.logits(pictures)
        return {
            "validation_loss": float(F.cross_entropy(logits, labels)),
            "validation_accuracy": float((logits.argmax(1) == labels).float().mean()),
        }


if __name__ == "__main__":
    training.main(options().parse_args(), DigitTrainer)
