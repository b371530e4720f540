# SPDX-License-Identifier: BSD-3-Clause
"""Uses of the collectives whose results two backends must share, bit for bit."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from support.deadline import OPERATION


@dataclass
class Peer:
    """One rank's side of a case. Its random tensors differ by rank and by case."""

    group: dist.ProcessGroup
    rank: int
    size: int
    random: torch.Generator

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(shape, generator=self.random, dtype=wide).to(dtype)
        return torch.randint(0, 5, shape, generator=self.random).to(dtype)

    def tensors(self, *shape: int) -> list[torch.Tensor]:
        """One tensor for each rank."""
        return [self.tensor(*shape) for _ in range(self.size)]

    @property
    def following(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def preceding(self) -> int:
        return (self.rank - 1) % self.size


# A case uses a collective in a process group and returns comparable results.
CASES: dict[str, Callable[[Peer], Any]] = {}


def case(function: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    CASES[function.__name__] = function
    return function


def run_case(name: str, group: dist.ProcessGroup) -> tuple[str, Any]:
    """Runs a case. Its results compare and pickle; an error counts as a result."""
    rank = dist.get_rank(group)
    seed = zlib.crc32(name.encode()) + rank
    peer = Peer(group, rank, dist.get_world_size(group), torch.Generator().manual_seed(seed))
    try:
        return ("returns", _digest(CASES[name](peer)))
    except Exception as error:  # an error is part of the behavior
        return ("raises", type(error).__name__)


def _digest(value: Any) -> Any:
    """Replaces tensors by dtype, shape and a hash of their bits: NaN equals itself, -0 is not 0."""
    if isinstance(value, torch.Tensor) and value.is_sparse:
        value = value.coalesce()
        return ("sparse", _digest(value.indices()), _digest(value.values()))
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), hashlib.sha256(bits).hexdigest())
    if isinstance(value, (list, tuple)):
        return [_digest(item) for item in value]
    return value


# Reductions: a compressor is likeliest to spoil these.

OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
]


def _all_reduce(peer: Peer, op: Any, *tensors: torch.Tensor) -> Any:
    for tensor in tensors:
        dist.all_reduce(tensor, op, peer.group)
    return tensors


def _all_reduce_of(peer: Peer, op: str, dtype: torch.dtype) -> Any:
    return _all_reduce(peer, getattr(dist.ReduceOp, op), peer.tensor(7, 5, dtype=dtype))


def _reduce(peer: Peer, op: str) -> Any:
    tensors = peer.tensors(4, 3)
    for destination, tensor in enumerate(tensors):
        dist.reduce(tensor, op=getattr(dist.ReduceOp, op), group_dst=destination, group=peer.group)
    # The other ranks' tensors are undefined after reduce.
    return tensors[peer.rank]


def _reduce_scatter(peer: Peer, op: str) -> Any:
    outputs = [torch.empty(4, 3), torch.empty(40, 30)]
    dist.reduce_scatter(outputs[0], peer.tensors(4, 3), getattr(dist.ReduceOp, op), peer.group)
    inputs = peer.tensor(40 * peer.size, 30)
    dist.reduce_scatter_tensor(outputs[1], inputs, getattr(dist.ReduceOp, op), peer.group)
    return outputs


for _op in OPS:
    CASES[f"reduce {_op}"] = partial(_reduce, op=_op)
    CASES[f"reduce_scatter {_op}"] = partial(_reduce_scatter, op=_op)
    for _dtype in DTYPES:
        _name = f"all_reduce {_op} {str(_dtype).removeprefix('torch.')}"
        CASES[_name] = partial(_all_reduce_of, op=_op, dtype=_dtype)


@case
def all_reduce_premultiplied(peer: Peer) -> Any:
    return _all_reduce(peer, dist._make_nccl_premul_sum(2.0), peer.tensor(7))


@case
def all_reduce_of_other_shapes_and_values(peer: Peer) -> Any:
    large = [peer.tensor(200_003), peer.tensor(500, 600), peer.tensor(30, 40).t()]
    small = [peer.tensor(), peer.tensor(0), peer.tensor(3, 0)]
    not_finite = peer.tensor(9)
    not_finite[peer.rank] = float("inf")
    not_finite[-1] = float("nan")
    works = [dist.all_reduce(tensor, group=peer.group, async_op=True) for tensor in large]
    for work in reversed(works):
        work.wait()
    return [large, _all_reduce(peer, dist.ReduceOp.SUM, *small, not_finite)]


@case
def all_reduce_coalesced(peer: Peer) -> Any:
    tensors = [peer.tensor(5), peer.tensor(300, 300), peer.tensor(150_000)]
    dist.all_reduce_coalesced(tensors, group=peer.group)
    integers = [peer.tensor(5, dtype=torch.int64), peer.tensor(8, dtype=torch.int64)]
    dist.all_reduce_coalesced(integers, dist.ReduceOp.MAX, peer.group, async_op=True).wait()
    return [tensors, integers]


@case
def all_reduce_in_coalescing_manager(peer: Peer) -> Any:
    tensors = [peer.tensor(5), peer.tensor(8)]
    with dist.distributed_c10d._coalescing_manager(peer.group):
        _all_reduce(peer, dist.ReduceOp.SUM, *tensors)
    return tensors


# Collectives that move data and compute nothing.


@case
def broadcast(peer: Peer) -> Any:
    tensors = peer.tensors(4, 3)
    for source, tensor in enumerate(tensors):
        dist.broadcast(tensor, group_src=source, group=peer.group)
    return tensors


@case
def all_gathers(peer: Peer) -> Any:
    parts, inputs = peer.tensors(4, 3), [peer.tensor(4), peer.tensor(2, 3)]
    dist.all_gather(parts, peer.tensor(4, 3), peer.group)
    coalesced = [[torch.empty_like(tensor) for tensor in inputs] for _ in range(peer.size)]
    dist.all_gather_coalesced(coalesced, inputs, peer.group)
    whole = [torch.empty(4 * peer.size, 3), torch.empty(4 * peer.size, 3)]
    dist.all_gather_into_tensor(whole[0], peer.tensor(4, 3), peer.group)
    dist.all_gather_into_tensor(whole[1], peer.tensor(4, 3), peer.group, async_op=True).wait()
    return [parts, coalesced, whole]


@case
def gather_and_scatter(peer: Peer) -> Any:
    results = []
    for root in range(peer.size):
        gathered, output = peer.tensors(4, 3) if peer.rank == root else None, torch.empty(4, 3)
        dist.gather(peer.tensor(4, 3), gathered, group_dst=root, group=peer.group)
        given = peer.tensors(4, 3) if peer.rank == root else None
        dist.scatter(output, given, group_src=root, group=peer.group)
        results.append([gathered, output])
    return results


@case
def all_to_all(peer: Peer) -> Any:
    outputs = [torch.empty(3) for _ in range(peer.size)]
    dist.all_to_all(outputs, peer.tensors(3), peer.group)
    return outputs


@case
def all_to_all_single(peer: Peer) -> Any:
    equal = torch.empty(2 * peer.size, 3)
    dist.all_to_all_single(equal, peer.tensor(2 * peer.size, 3), group=peer.group)
    # Rank r sends s + 1 rows to rank s.
    sent = [other + 1 for other in range(peer.size)]
    received = [peer.rank + 1] * peer.size
    split = torch.empty(sum(received), 3)
    dist.all_to_all_single(split, peer.tensor(sum(sent), 3), received, sent, peer.group)
    return [equal, split]


@case
def barriers(peer: Peer) -> Any:
    dist.barrier(peer.group)
    dist.barrier(peer.group, async_op=True).wait()
    # dist.monitored_barrier refuses every backend that is not called "gloo".
    group: Any = peer.group  # its type lacks the method
    group.monitored_barrier(timedelta(seconds=OPERATION))
    group.monitored_barrier(timedelta(seconds=OPERATION), wait_all_ranks=True)
    return dist.get_world_size(peer.group)


# Point to point.


@case
def batch_isend_irecv(peer: Peer) -> Any:
    received = [torch.empty(4), torch.empty(50_000)]
    operations = []
    for tag, tensor in enumerate(received):
        to: dict[str, Any] = {"group": peer.group, "tag": tag}
        sent = peer.tensor(tensor.numel())
        operations.append(dist.P2POp(dist.isend, sent, group_peer=peer.following, **to))
        operations.append(dist.P2POp(dist.irecv, tensor, group_peer=peer.preceding, **to))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@case
def recv_from_any_source(peer: Peer) -> Any:
    if peer.rank != 0:
        for tag in (2, 3):
            dist.send(peer.tensor(4), group_dst=0, group=peer.group, tag=tag)
        return None
    received = []
    for _ in range(peer.size - 1):
        source = dist.recv(tensor := torch.empty(4), group=peer.group, tag=2)
        received.append([source, tensor.tolist()])
    tensors = [torch.empty(4) for _ in range(peer.size - 1)]
    works: list[Any] = [dist.irecv(tensor, group=peer.group, tag=3) for tensor in tensors]
    for work in works:
        work.wait()
    return [sorted(received), sorted(tensor.tolist() for tensor in tensors)]


# Functions that torch builds on its collectives, and errors.


@case
def object_collectives(peer: Peer) -> Any:
    mine = {"rank": peer.rank, "text": "x" * (peer.rank + 1)}
    gathered: list[Any] = [None] * peer.size
    dist.all_gather_object(gathered, mine, peer.group)
    at_one: list[Any] | None = [None] * peer.size if peer.rank == 1 else None
    dist.gather_object(mine, at_one, group_dst=1, group=peer.group)
    everyone = [mine, "second"] if peer.rank == 1 else [None, None]
    dist.broadcast_object_list(everyone, group_src=1, group=peer.group)
    given: list[Any] | None = None
    if peer.rank == 0:
        given = [{"for": rank} for rank in range(peer.size)]
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, given, group_src=0, group=peer.group)
    return [gathered, at_one, everyone, scattered]


@case
def functional_collectives(peer: Peer) -> Any:
    group, parts = peer.group, peer.tensors(4, 3)
    tensor, whole = peer.tensor(4, 3), torch.cat(parts)
    results = [functional.all_reduce(tensor, op, group) for op in ("sum", "avg", "max")]
    results += [functional.all_gather_tensor(tensor, dim, group) for dim in (0, 1)]
    results.append(functional.reduce_scatter_tensor(whole, "sum", 0, group))
    results.append(functional.all_to_all_single(whole, None, None, group))
    results.append(functional.broadcast(tensor, 1, group))
    results += functional.all_reduce_coalesced(parts, "sum", group)
    results += functional.all_gather_into_tensor_coalesced(parts, group)
    results += functional.reduce_scatter_tensor_coalesced([whole, 2 * whole], "sum", [0, 0], group)
    return [functional.wait_tensor(result) for result in results]


@case
def wrong_root(peer: Peer) -> Any:
    return dist.broadcast(peer.tensor(3), group_src=peer.size, group=peer.group)


@case
def different_dtypes_coalesced(peer: Peer) -> Any:
    tensors = [peer.tensor(3), peer.tensor(3, dtype=torch.int64)]
    peer.group.allreduce_coalesced(tensors).wait()
    return tensors
