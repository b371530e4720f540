# SPDX-License-Identifier: BSD-3-Clause
"""Trains a small language model with DistributedDataParallel, with or without compression.

    torchrun --nproc-per-node 2 examples/train_lm.py --backend gloo
    torchrun --nproc-per-node 2 examples/train_lm.py --backend powersgd

Compression has its default options, unless --rank and --wire-dtype say otherwise. The
loop, and the lines that compression adds to it, are in training.py.
"""

import argparse

import torch
import training
from char_gpt import CharGPT, Shape, read_text, sample
from torch import nn


def options() -> argparse.ArgumentParser:
    parser = training.common_options(__doc__)
    parser.set_defaults(steps=350, batch=2, lr=5e-4)
    parser.add_argument("--context", type=int, default=128, help="characters per sequence (128)")
    parser.add_argument("--layers", type=int, default=3, help="number of layers (3)")
    parser.add_argument("--width", type=int, default=512, help="width of the model (512)")
    parser.add_argument("--heads", type=int, default=8, help="attention heads per layer (8)")
    parser.add_argument("--characters", type=int, default=4_000_000, help="characters of the text")
    parser.add_argument("--validation-batches", type=int, default=16, help="batches per validation")
    return parser


class LanguageTrainer(training.Trainer):
    def __init__(self, args: argparse.Namespace, wrap: training.Wrap | None = None) -> None:
        torch.manual_seed(args.seed)
        model = self.make_model(args)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        super().__init__(args, model, optimizer, wrap)

        text = read_text(args.characters)
        shards, self.validation = text[: -len(text) // 10], text[-len(text) // 10 :]
        self.shard = shards.chunk(self.world)[self.rank]

    @staticmethod
    def make_model(args: argparse.Namespace) -> nn.Module:
        return CharGPT(Shape(args.layers, args.width, args.heads, args.context))

    def sample(self, generator: torch.Generator) -> training.Batch:
        return sample(self.shard, self.args.batch, self.args.context, generator)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The mean loss over windows, which are the same at every step."""
        generator = torch.Generator().manual_seed(self.rank)
        total = torch.zeros(())
        for _ in range(self.args.validation_batches):
            total += self.model(*sample(self.validation, 2, self.args.context, generator))
        return {"validation_loss": self.mean(float(total) / self.args.validation_batches)}


if __name__ == "__main__":
    training.main(options().parse_args(), LanguageTrainer)
