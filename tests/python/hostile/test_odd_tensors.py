# SPDX-License-Identifier: BSD-3-Clause
"""All-reduces of tensors of every kind that torch has: the result or the error of Gloo, to the bit.

Two kinds are left out, as plain Gloo writes beyond their memory, which kills a process now and
then: expanded tensors, and those whose storage was freed.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor

import torch_powersgd as tp
from support.on_ranks import all_agree, on_ranks
from support.state_damage import Subclass

Make = Callable[[torch.Tensor], torch.Tensor]


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
    "imaginary part": lambda x: torch.complex(x, x).conj().imag,
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


def make_tensor(kind: str, rows: int, cols: int, rank: int) -> torch.Tensor:
    """The tensor of a kind. A kind that torch cannot make of this shape raises what torch does."""
    generator = torch.Generator().manual_seed(1000 * rows + 10 * cols + rank)
    return KINDS[kind](torch.randn(rows, cols, generator=generator))


# The options of each group in which every collective must give what Gloo gives.
EXACT: dict[str, dict[str, Any]] = {
    "backward": {"scope": "backward", "start_powerSGD_iter": 0},
    "attached": {"scope": "attached", "start_powerSGD_iter": 0, "min_numel": 1},
    "never": {"scope": "never", "start_powerSGD_iter": 0, "min_numel": 1},
    "later, in a block": {"start_powerSGD_iter": 10**9, "min_numel": 1},
}
COMPRESSED = {"start_powerSGD_iter": 0, "min_numel": 1, "use_error_feedback": False}


def _all_reduce(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    dist.all_reduce(tensor, op, group=group)
    return tensor


def _coalesced(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    tensors = [tensor, tensor.clone()]
    dist.all_reduce_coalesced(tensors, op, group=group)
    return torch.stack(tensors)


def _broadcast(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    dist.broadcast(tensor, group_src=1, group=group)
    return tensor


def _all_gather(tensor: torch.Tensor, op: Any, group: Any) -> torch.Tensor:
    outputs = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(outputs, tensor, group=group)
    return torch.stack(outputs)


COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _coalesced,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
}
OPS = ["SUM", "SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BXOR", "PREMUL_SUM"]

# A kind, rows, columns, and the operation that reduces.
Drawn = tuple[str, int, int, str]
COUNTS = pytest.mark.parametrize("count", [100, pytest.param(1500, marks=pytest.mark.long)])
SIZES = [1, 2, 3, 7, 16, 40]


def _draw(random: Random) -> Drawn:
    return random.choice([*KINDS]), random.choice(SIZES), random.choice(SIZES), random.choice(OPS)


def _run(group: Any, collective: Callable[..., torch.Tensor], drawn: Drawn) -> tuple[str, str]:
    """The end of a collective: "raises" with the type of the error, or "returns" with a hash."""
    kind, rows, cols, op = drawn
    try:
        tensor = make_tensor(kind, rows, cols, dist.get_rank())
        return "returns", _hash(collective(tensor, getattr(dist.ReduceOp, op), group))
    except Exception as error:
        return "raises", type(error).__name__


def _hash(value: torch.Tensor) -> str:
    """A hash of the bits of a tensor, which may be of a kind that has none."""
    if value.device.type == "meta" or value.is_quantized:
        return repr((value.shape, value.dtype))
    if value.layout != torch.strided:
        value = value.to_dense()
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    try:
        bits = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    except Exception as error:  # A tensor without memory, such as a fake one.
        return type(error).__name__
    return hashlib.sha256(bits).hexdigest() + str(value.dtype)


@COUNTS
@on_ranks(2, backend="gloo")
def test_what_is_not_compressed_is_as_over_gloo(rank: int, count: int) -> None:
    """Every kind is all-reduced, and others are drawn with any collective."""
    warnings.simplefilter("ignore")
    gloo = dist.new_group(backend="gloo")
    groups = {
        name: dist.new_group(backend="cpu:powersgd", pg_options=options)
        for name, options in EXACT.items()
    }
    random = Random(0)
    calls: list[tuple[str, Drawn]] = [("all_reduce", (kind, 16, 7, "SUM")) for kind in KINDS]
    calls += [(random.choice([*COLLECTIVES]), _draw(random)) for _ in range(count)]
    for name, drawn in calls:
        expected = _run(gloo, COLLECTIVES[name], drawn)
        for options, group in groups.items():
            with tp.scope("always") if "block" in options else contextlib.nullcontext():
                found = _run(group, COLLECTIVES[name], drawn)
            assert found == expected, (name, drawn, options)
        assert all_agree(expected[0]), (name, drawn)


@COUNTS
@on_ranks(2, backend="gloo")
def test_what_is_compressed_is_equal_on_all_ranks(rank: int, count: int) -> None:
    warnings.simplefilter("ignore")
    gloo = dist.new_group(backend="gloo")
    compressed = dist.new_group(backend="cpu:powersgd", pg_options=COMPRESSED)
    random = Random(0)
    for drawn in [_draw(random) for _ in range(count)]:
        expected = _run(gloo, _all_reduce, drawn)
        with tp.scope("always"):
            found = _run(compressed, _all_reduce, drawn)
        assert found[0] == expected[0], drawn
        # Gloo itself leaves some kinds as they were, such as a negated view.
        same_over_gloo = all_agree(expected)
        assert all_agree(found) or not same_over_gloo, drawn
