# SPDX-License-Identifier: BSD-3-Clause
"""The training tasks: GPTs on the demo's text, and ResNet-50 on random images."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from char_gpt import CharGPT, Shape, read_text, sample
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
_SEED_SHIFT = 20  # a seed has fewer than 2**20 batches


class Task(Protocol):
    def make(self) -> nn.Module:
        """A module whose forward(*batch) is the loss."""

    def data(self, rank: int, world: int, seed: int) -> Callable[[int], Batch]:
        """The batch of each step. It depends on the rank and the seed, not on the method."""


@dataclass(frozen=True)
class Text:
    shape: Shape
    batch: int
    context: int  # of the batches
    characters: int = 4_000_000

    def make(self) -> nn.Module:
        return CharGPT(self.shape)

    def data(self, rank: int, world: int, seed: int) -> Callable[[int], Batch]:
        """Each rank trains on its own part of the text."""
        shard = read_text(self.characters).chunk(world)[rank]

        def at(step: int) -> Batch:
            generator = torch.Generator().manual_seed((seed << _SEED_SHIFT) + step * world + rank)
            batch: Batch = sample(shard, self.batch, self.context, generator)
            return batch

        return at


@dataclass(frozen=True)
class Images:
    """Random images: they measure the time of a step, not a loss."""

    batch: int

    def make(self) -> nn.Module:
        import torchvision

        return _Classifier(torchvision.models.resnet50())

    def data(self, rank: int, world: int, seed: int) -> Callable[[int], Batch]:
        generator = torch.Generator().manual_seed((seed << _SEED_SHIFT) + rank)
        images = torch.randn(self.batch, 3, 224, 224, generator=generator)
        labels = torch.randint(1000, (self.batch,), generator=generator)
        return lambda step: (images, labels)


class _Classifier(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(images), labels)


def lacks(model: str) -> str:
    """The Python module that this model needs and that is missing, or an empty string."""
    needs = "torchvision" if isinstance(TASKS[model], Images) else "torch"
    return "" if importlib.util.find_spec(needs) else f"the module {needs} (for {model})"


def loss_of(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The loss of a batch. On a GPU the model computes in 16 bits, as is usual."""
    device_type = batch[0].device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda"):
        loss: Tensor = module(*batch)
    return loss


TASKS: dict[str, Task] = {
    # The optimizer is that of examples/train_lm.py.
    "demo": Text(Shape(layers=3, width=512, heads=8, context=128), 2, 128),
    # For machines with few cores, and for tests.
    "gpt-1M": Text(Shape(layers=3, width=160, heads=5, context=128), 1, 64, 400_000),
    # For many processes on few cores: few tokens for its parameters.
    "gpt-5M": Text(Shape(layers=6, width=256, heads=8, context=128), 1, 32, 400_000),
    # GPT-2 small (without biases) on characters, which are the first 128 of its tokens.
    "gpt2": Text(Shape(layers=12, width=768, heads=12, context=1024, vocabulary=50257), 4, 256),
    "resnet50": Images(32),
}
