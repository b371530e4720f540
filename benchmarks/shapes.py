# SPDX-License-Identifier: BSD-3-Clause
"""The parameter shapes of well-known models, in the order of their parameters."""

from __future__ import annotations

Shape = tuple[int, ...]


def _norm(channels: int) -> list[Shape]:
    return [(channels,), (channels,)]


def resnet18() -> list[Shape]:
    """He et al., Deep Residual Learning for Image Recognition, 2015, with 11.7 M parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), *_norm(64)]
    width = 64
    for stage, out in enumerate((64, 128, 256, 512)):
        for block in range(2):
            shapes += [(out, width, 3, 3), *_norm(out), (out, out, 3, 3), *_norm(out)]
            if stage > 0 and block == 0:
                shapes += [(out, width, 1, 1), *_norm(out)]
            width = out
    return [*shapes, (1000, 512), (1000,)]


def resnet50() -> list[Shape]:
    """The bottleneck variant of the same paper, with 25.6 M parameters."""
    shapes: list[Shape] = [(64, 3, 7, 7), *_norm(64)]
    width = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            shapes += [(inner, width, 1, 1), *_norm(inner), (inner, inner, 3, 3), *_norm(inner)]
            shapes += [(4 * inner, inner, 1, 1), *_norm(4 * inner)]
            if block == 0:
                shapes += [(4 * inner, width, 1, 1), *_norm(4 * inner)]
            width = 4 * inner
    return [*shapes, (1000, 2048), (1000,)]


def gpt(layers: int, width: int, vocabulary: int, context: int, bias: bool = True) -> list[Shape]:
    """Radford et al., Language Models are Unsupervised Multitask Learners, 2019."""
    norm: list[Shape] = _norm(width) if bias else [(width,)]
    shapes: list[Shape] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += norm
        for rows, cols in ((3 * width, width), (width, width)):
            shapes += [(rows, cols), *([(rows,)] if bias else [])]
        shapes += norm
        for rows, cols in ((4 * width, width), (width, 4 * width)):
            shapes += [(rows, cols), *([(rows,)] if bias else [])]
    return [*shapes, *norm]


def gpt2() -> list[Shape]:
    """GPT-2 small: 124.4 M parameters."""
    return gpt(12, 768, 50257, 1024)


def demo_gpt() -> list[Shape]:
    """The language model of `make demo`: 9.6 M parameters."""
    return gpt(3, 512, 128, 128, bias=False)


def llama_layers(layers: int = 4) -> list[Shape]:
    """Layers of Llama 7B (Touvron et al., 2023): 202.4 M parameters each."""
    square, wide = [(4096, 4096)] * 4, [(11008, 4096)] * 2
    layer: list[Shape] = [*square, *wide, (4096, 11008), (4096,), (4096,)]
    return layer * layers


MODELS = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "gpt2": gpt2,
    "demo": demo_gpt,
    "llama": llama_layers,
}
