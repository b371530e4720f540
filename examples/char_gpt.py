# SPDX-License-Identifier: BSD-3-Clause
"""A small character-level GPT, and its text: the sources of Python's standard library."""

import math
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 128  # ASCII; any other character reads as "?"


@dataclass(frozen=True)
class Shape:
    layers: int = 4
    width: int = 448
    heads: int = 7
    context: int = 128
    vocabulary: int = VOCABULARY


class Block(nn.Module):
    """Attention, then a perceptron. The output of each is added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.attention_in = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        qkv = self.attention_in(self.attention_norm(x))
        q, k, v = qkv.view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        result: torch.Tensor = attended + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(attended))))
        return result


class CharGPT(nn.Module):
    """The GPT-2 architecture without biases. The output layer shares the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)

        # The layers that write into the residual stream start smaller, as in GPT-2, so that its
        # variance does not grow with depth.
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes_residual = name.endswith("_out.weight")
                std = 0.02 / math.sqrt(2 * shape.layers) if writes_residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, characters: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy, in nats per character."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        x = self.token(characters) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.token.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(characters: int) -> torch.Tensor:
    """The first characters of the standard library, whose files have one fixed random order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = sorted(f.relative_to(root) for f in root.rglob("*.py"))
    files = [f for f in files if not skip.intersection(f.parts)]
    random.Random(0).shuffle(files)

    text = bytearray()
    for file in files:
        source = (root / file).read_text(encoding="utf-8", errors="replace")
        text += source.encode("ascii", errors="replace")
        if len(text) >= characters:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:characters]


def sample(
    text: torch.Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the text, and the same windows one character further on."""
    starts = torch.randint(len(text) - context, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
