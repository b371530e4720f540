# SPDX-License-Identifier: BSD-3-Clause
"""The training tasks of the ranks: a model, and the batches that a rank feeds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from char_gpt import CharGPT, Shape, read_text, sample
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
_SEED_SHIFT = 20  # a seed's batches are numbered below 2**20


@dataclass(frozen=True)
class Task:
    make: Callable[[], nn.Module]  # a module whose forward(*batch) is the loss
    # Maps (rank, world size, seed) and then a step to a batch, which is the same for every method.
    data: Callable[[int, int, int], Callable[[int], Batch]]


def _text(
    batch: int, context: int, characters: int = 4_000_000
) -> Callable[[int, int, int], Callable[[int], Batch]]:
    """Windows of the demo's text. Each rank has a part of its own."""

    def data(rank: int, world: int, seed: int) -> Callable[[int], Batch]:
        shard = read_text(characters).chunk(world)[rank]

        def at(step: int) -> Batch:
            generator = torch.Generator().manual_seed((seed << _SEED_SHIFT) + step * world + rank)
            return sample(shard, batch, context, generator)

        return at

    return data


def _pictures(batch: int) -> Callable[[int, int, int], Callable[[int], Batch]]:
    """Noise. The cost is measured, and nothing is learned."""

    def data(rank: int, world: int, seed: int) -> Callable[[int], Batch]:
        generator = torch.Generator().manual_seed((seed << _SEED_SHIFT) + rank)
        pictures = torch.randn(batch, 3, 224, 224, generator=generator)
        labels = torch.randint(1000, (batch,), generator=generator)
        return lambda step: (pictures, labels)

    return data


class Convolution(nn.Module):
    """A convolution without bias, and batch normalization."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(self.convolution(x))
        return result


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.narrow = Convolution(inputs, width, 1)
        self.middle = Convolution(width, width, 3, stride)
        self.widen = Convolution(width, 4 * width, 1)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else Convolution(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.middle(F.relu(self.narrow(x))))
        return F.relu(self.widen(inner) + self.shortcut(x))


class ResNet50(nn.Module):
    """He et al., Deep Residual Learning for Image Recognition, 2015. forward() returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Convolution(3, 64, 7, 2)
        blocks = []
        inputs = 64
        for stage, count in enumerate((3, 4, 6, 3)):
            width = 64 << stage
            for block in range(count):
                blocks.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(inputs, 1000)

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(pictures)), 3, 2, 1)
        x = self.blocks(x).mean((2, 3))
        return F.cross_entropy(self.classify(x), labels)


def _gpt(**shape: Any) -> Callable[[], nn.Module]:
    return lambda: CharGPT(Shape(**shape))


def loss_of(module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """A model that computes in 16 bits on a GPU, as such models train."""
    device_type = batch[0].device.type
    with torch.autocast(device_type, torch.bfloat16, enabled=device_type == "cuda"):
        loss: Tensor = module(*batch)
    return loss


TASKS = {
    # The optimizer is that of examples/train_lm.py.
    "demo": Task(_gpt(layers=3, width=512, heads=8, context=128), _text(2, 128)),
    # For machines with few cores, and for tests.
    "gpt-1M": Task(_gpt(layers=3, width=160, heads=5, context=128), _text(1, 64, 400_000)),
    # GPT-2 small (without biases) on characters, which are the first 128 of its tokens.
    "gpt2": Task(
        _gpt(layers=12, width=768, heads=12, context=1024, vocabulary=50257), _text(4, 256)
    ),
    "resnet50": Task(ResNet50, _pictures(32)),
}
