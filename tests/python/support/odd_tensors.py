# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of every kind that torch has, as arguments of collectives. They depend on the rank.

Two kinds are left out, as plain Gloo writes beyond their memory, which kills a process now and
then: expanded tensors, and those whose storage was freed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

from support.state_damage import Subclass

Make = Callable[[torch.Tensor], torch.Tensor]


def _imaginary(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x, x).conj().imag


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone() * 1


def _fake(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(x.shape)


def _nested(layout: torch.layout) -> Make:
    return lambda x: torch.nested.nested_tensor([x.flatten()[:2], x.flatten()[2:5]], layout=layout)


# Each makes a tensor from one of normal numbers in two dimensions.
KINDS: dict[str, Make] = {
    "plain": lambda x: x,
    "flat": lambda x: x.flatten(),
    "transposed": lambda x: x.t(),
    "strided": lambda x: torch.cat([x, x])[::2],
    "offset": lambda x: torch.cat([x.flatten(), x.flatten()])[3:],
    "flipped": lambda x: x.flip(0),
    "no elements": lambda x: x[:0],
    "0-d": lambda x: x.sum(),
    "four dimensions": lambda x: x.reshape(1, *x.shape, 1).contiguous(),
    "channels last": lambda x: x.reshape(1, *x.shape, 1).to(memory_format=torch.channels_last),
    "leaf that needs grad": lambda x: x.requires_grad_(),
    "result that needs grad": lambda x: x.requires_grad_() * 2,
    "parameter": lambda x: torch.nn.Parameter(x),
    "subclass": lambda x: x.as_subclass(Subclass),
    "inference": _inference,
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "int64": lambda x: (100 * x).long(),
    "int8": lambda x: x.to(torch.int8),
    "uint16": lambda x: x.abs().to(torch.uint16),
    "bool": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "conjugated": lambda x: x.to(torch.complex64).conj(),
    "negated": lambda x: torch._neg_view(x),
    "imaginary part": _imaginary,
    "NaN": lambda x: x * torch.nan,
    "infinite": lambda x: x / 0,
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "sparse": lambda x: x.to_sparse(),
    "sparse rows": lambda x: x.to_sparse_csr(),
    "mkldnn": lambda x: x.to_mkldnn(),
    "meta": lambda x: x.to("meta"),
    "nested": _nested(torch.strided),
    "jagged": _nested(torch.jagged),
    "masked": lambda x: masked_tensor(x, x > 0),
    "fake": _fake,
}


def make(kind: str, rows: int, cols: int, rank: int) -> torch.Tensor:
    """The tensor of a kind. A kind that torch cannot make of this shape raises what torch does."""
    generator = torch.Generator().manual_seed(1000 * rows + 10 * cols + rank)
    return KINDS[kind](torch.randn(rows, cols, generator=generator))
