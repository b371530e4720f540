# SPDX-License-Identifier: BSD-3-Clause
"""One rank's side of collectives on odd tensors: over Gloo, and over this backend in each scope."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from support import odd_tensors, ranks
from support.synthetic import reduce_in_backward

SECONDS = 300
NEVER = 10**9
# The options of each group in which every collective must give what Gloo gives.
EXACT = {
    "backward": {"scope": "backward", "start_powerSGD_iter": 0},
    "attached": {"scope": "attached", "start_powerSGD_iter": 0, "min_numel": 1},
    "never": {"scope": "never", "start_powerSGD_iter": 0, "min_numel": 1},
    "later": {"scope": "always", "start_powerSGD_iter": NEVER, "min_numel": 1},
}
COMPRESSED = {"scope": "always", "start_powerSGD_iter": 0, "min_numel": 1}

# It takes a tensor, the operation, the group and its size.
Collective = Callable[[torch.Tensor, Any, Any, int], Any]
# The end of a collective: "raises" with the type of the error, or "returns" with a hash.
Result = tuple[str, str]


def _all_reduce(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    dist.all_reduce(tensor, op, group=group)
    return tensor


def _in_backward(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    return reduce_in_backward([tensor], op)[0]


def _coalesced(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    tensors = [tensor, tensor.clone()]
    dist.all_reduce_coalesced(tensors, op, group=group)
    return torch.stack(tensors)


def _one_by_one(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    tensors = [tensor, tensor.clone()]
    for each in tensors:
        dist.all_reduce(each, op, group=group)
    return torch.stack(tensors)


def _reduce(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    dist.reduce(tensor, group_dst=0, op=op, group=group)
    return tensor if dist.get_rank() == 0 else None


def _broadcast(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    dist.broadcast(tensor, group_src=1, group=group)
    return tensor


def _all_gather(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    outputs = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(outputs, tensor, group=group)
    return torch.stack(outputs)


def _gather(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    outputs = [torch.empty_like(tensor) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(tensor, outputs, group_dst=0, group=group)
    return outputs and torch.stack(outputs)


def _scatter(tensor: torch.Tensor, op: Any, group: Any, size: int) -> Any:
    output = torch.empty_like(tensor)
    inputs = [tensor, tensor.clone()] if dist.get_rank() == 0 else None
    dist.scatter(output, inputs, group_src=0, group=group)
    return output


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _coalesced,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
}
OPS = ["SUM", "SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BXOR", "PREMUL_SUM"]


class OddCollectives:
    """The groups of one rank."""

    def __init__(self, rank: int) -> None:
        warnings.simplefilter("ignore")
        self.rank = rank
        ranks.init_group("gloo", None, SECONDS)
        self.gloo = dist.new_group(backend="gloo")
        self.exact = {
            name: dist.new_group(backend="cpu:powersgd", pg_options=options)
            for name, options in EXACT.items()
        }
        self.compressed = dist.new_group(backend="cpu:powersgd", pg_options=COMPRESSED)

    def compare(self, collective: str, kind: str, rows: int, cols: int, op: str) -> str:
        """Compares all exact groups with Gloo. Returns what Gloo does."""
        expected = self._run(self.gloo, COLLECTIVES[collective], kind, rows, cols, op)
        for name, group in self.exact.items():
            found = self._run(group, COLLECTIVES[collective], kind, rows, cols, op)
            may_be = [expected]
            if collective == "all_reduce_coalesced" and EXACT[name]["scope"] == "always":
                # Each tensor goes by itself, and Gloo takes kinds so that it refuses together.
                may_be.append(self._run(self.gloo, _one_by_one, kind, rows, cols, op))
            assert found in may_be, (name, found, may_be)
        return expected[0]

    def compress(self, kind: str, rows: int, cols: int, op: str) -> tuple[Result, Result]:
        """The sums over Gloo and in a group that compresses all that it can."""
        expected = self._run(self.gloo, _all_reduce, kind, rows, cols, op)
        found = self._run(self.compressed, _all_reduce, kind, rows, cols, op)
        assert found[0] == expected[0], (found, expected)
        return expected, found

    def _run(
        self, group: Any, collective: Collective, kind: str, rows: int, cols: int, op: str
    ) -> Result:
        try:
            tensor = odd_tensors.make(kind, rows, cols, self.rank)
            return "returns", _hash(collective(tensor, getattr(dist.ReduceOp, op), group, 2))
        except Exception as error:
            return "raises", type(error).__name__


def _hash(value: Any) -> str:
    """A hash of the bits of a tensor, which may be of a kind that has none."""
    if value is None or value.device.type == "meta" or value.is_quantized:
        return repr(value if value is None else (value.shape, value.dtype))
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        value = value.to_dense()
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    try:
        bits = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    except Exception as error:  # A tensor without memory, such as a fake one.
        return type(error).__name__
    return hashlib.sha256(bits).hexdigest() + str(value.dtype)
