# SPDX-License-Identifier: BSD-3-Clause
"""Compares the compression stages with the forward and backward pass of a large model, on one GPU.

    python benchmarks/bench_model.py
    python benchmarks/bench_model.py --batches 1 4 --sequence 4096 --ranks 16 --json model.json

The model is a bfloat16 decoder with 3.2 billion parameters. It has the shapes of Llama 3.2 3B
(Grattafiori et al., 2024), random weights and random tokens. The program first times a dense step:
the loss and its gradients, without an optimizer or rotary position embeddings. It then frees the
model, and runs all four stages on all buckets that DDP would build for its gradients. The share is
the stages' time divided by the dense step's.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from clock import Clock, PeakMemory
from report import processor, provenance, write
from stages.contestants import Ours
from torch import Tensor, nn
from torch.nn import functional as F

import torch_powersgd
from torch_powersgd.tools.footprint import buckets_of

DTYPE = torch.bfloat16
WARMUPS = 2


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder, by default those of Llama 3.2 3B."""

    layers: int = 28
    width: int = 3072
    inner: int = 8192  # the width of the feed-forward part
    heads: int = 24
    key_heads: int = 8  # each is shared by several heads
    vocabulary: int = 128256


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.head = shape.width // shape.heads
        keys = shape.key_heads * self.head
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, keys, bias=False)
        self.value = nn.Linear(shape.width, keys, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        x = x.unflatten(-1, (count, self.head)).transpose(1, 2)
        return x.repeat_interleave(self.shape.heads // count, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_1(x)
        query = self._heads(self.query(y), self.shape.heads)
        key = self._heads(self.key(y), self.shape.key_heads)
        value = self._heads(self.value(y), self.shape.key_heads)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Decoder(nn.Module):
    """forward() returns the loss. The embedding and the output layer share a matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def dense_step(shape: Shape, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The time of a forward and backward pass."""
    device = torch.device(arguments.device)
    memory = PeakMemory(device)
    clock = Clock(device)
    with _made_as(DTYPE, device):
        model = Decoder(shape)
    tokens = torch.randint(shape.vocabulary, (2, batch, arguments.sequence), device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens[0], tokens[1]).backward()

    clock.median(step, WARMUPS)
    ms = clock.median(step, arguments.repeats)
    return {"batch": batch, "ms": ms, "peak_memory_bytes": memory.bytes()}


@contextlib.contextmanager
def _made_as(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Creates parameters with this dtype on this device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def stages(shape: Shape, rank: int, residual: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The time of all stages of all buckets, while the host is ahead of the device."""
    device = torch.device(arguments.device)
    with torch.device("meta"):
        shapes = [list(parameter.shape) for parameter in Decoder(shape).parameters()]
    memory = PeakMemory(device)
    clock = Clock(device)
    layout = buckets_of(shapes, DTYPE)
    options = torch_powersgd.Options.hook_defaults(
        matrix_approximation_rank=rank, residual_dtype=getattr(torch, residual)
    )
    ours = Ours(layout, options, DTYPE, device)
    sizes = [sum(math.prod(each) for each in bucket) for bucket in layout]
    gradients = [torch.randn(size, dtype=DTYPE, device=device) for size in sizes]
    clock.median(lambda: ours.run(gradients), WARMUPS)
    by_stage = ours.stage_ms(clock, gradients, arguments.repeats, lambda: None)
    ms = clock.median(lambda: ours.run(gradients), arguments.repeats, ahead=True)
    return {
        "rank": rank,
        "residual_dtype": residual,
        "buckets": len(layout),
        "stage_ms": by_stage,
        "ms": ms,
        "memory_bytes": memory.bytes(),
    }


def _collect() -> None:
    """Frees unused memory for the next measurement."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_dense(shape: Shape, arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    for batch in arguments.batches:
        try:
            found = dense_step(shape, batch, arguments)
        except torch.cuda.OutOfMemoryError:
            print(f"batch {batch} x {arguments.sequence} tokens: out of memory", flush=True)
            continue
        finally:
            _collect()
        record["dense"].append(found)
        write(record, arguments.json)
        peak = f"peak memory {found['peak_memory_bytes'] / 1e9:.1f} GB"
        tokens = f"{batch} x {arguments.sequence} tokens"
        print(f"dense step, {tokens}: {found['ms']:.1f} ms, {peak}", flush=True)


def measure_stages(shape: Shape, arguments: argparse.Namespace, record: dict[str, Any]) -> None:
    for residual in arguments.residuals:
        for rank in arguments.ranks:
            found = stages(shape, rank, residual, arguments)
            _collect()
            found["share"] = {d["batch"]: found["ms"] / d["ms"] for d in record["dense"]}
            record["stages"].append(found)
            write(record, arguments.json)
            shares = (f"{share:.1%} of batch {batch}" for batch, share in found["share"].items())
            print(f"stages, rank {rank}, {residual} residual: {found['ms']:.2f} ms", end="; ")
            print(*shares, sep=", ", flush=True)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="cuda", choices=["cpu", "cuda"], help="device (cuda)")
    add("--batches", nargs="+", type=int, default=[1, 2, 4], help="sequences per step (1 2 4)")
    add("--sequence", type=int, default=2048, help="tokens per sequence (2048)")
    add("--ranks", nargs="+", type=int, default=[4, 16], help="matrix ranks (4 16)")
    kinds: dict[str, Any] = {"default": ["float32", "bfloat16"], "choices": ["float32", "bfloat16"]}
    add("--residuals", nargs="+", help="dtypes of the residual (float32 bfloat16)", **kinds)
    add("--repeats", type=int, default=10, help="number of timed steps (10)")
    add("--json", type=Path, help="file for the results, written after every configuration")
    sizes = vars(Shape())
    for name, size in sizes.items():
        add(f"--{name.replace('_', '-')}", type=int, default=size, help=f"model shape ({size})")
    return parser.parse_args(words)


def main() -> None:
    arguments = parse_arguments()
    shape = Shape(**{name: getattr(arguments, name) for name in vars(Shape())})
    on_gpu = arguments.device == "cuda"
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Decoder(shape).parameters())
    record: dict[str, Any] = {
        **provenance(torch.cuda.get_device_name() if on_gpu else processor()),
        "parameters": parameters,
        "shape": vars(shape),
        "sequence": arguments.sequence,
        "dense": [],
        "stages": [],
    }
    print(f"{parameters / 1e9:.2f} billion bfloat16 parameters, {record['device']}", flush=True)
    measure_dense(shape, arguments, record)
    measure_stages(shape, arguments, record)


if __name__ == "__main__":
    main()
