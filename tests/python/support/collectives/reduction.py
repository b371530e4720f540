# SPDX-License-Identifier: BSD-3-Clause
"""Cases of the collectives that reduce: a compressor is likeliest to spoil these."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from support.collectives.case import CASES, DTYPES, Peer, case

OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]


def _all_reduce(peer: Peer, op: str, dtype: torch.dtype) -> Any:
    tensor = peer.tensor(7, 5, dtype=dtype)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), peer.group)
    return tensor


for _op in OPS:
    for _dtype in DTYPES:
        _name = f"all_reduce {_op} {str(_dtype).removeprefix('torch.')}"
        CASES[_name] = partial(_all_reduce, op=_op, dtype=_dtype)


@case
def all_reduce_premultiplied(peer: Peer) -> Any:
    tensor = peer.tensor(7)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0), peer.group)
    return tensor


@case
def all_reduce_large_flat(peer: Peer) -> Any:
    tensor = peer.tensor(200_003)
    dist.all_reduce(tensor, group=peer.group)
    return tensor


@case
def all_reduce_large_matrix_average(peer: Peer) -> Any:
    tensor = peer.tensor(500, 600)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, peer.group)
    return tensor


@case
def all_reduce_asynchronous(peer: Peer) -> Any:
    tensors = [peer.tensor(100_000) for _ in range(4)]
    works = [dist.all_reduce(tensor, group=peer.group, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    return tensors


@case
def all_reduce_scalar_and_empty(peer: Peer) -> Any:
    tensors = [peer.tensor(), peer.tensor(0), peer.tensor(3, 0)]
    for tensor in tensors:
        dist.all_reduce(tensor, group=peer.group)
    return tensors


@case
def all_reduce_not_finite(peer: Peer) -> Any:
    tensor = peer.tensor(9)
    tensor[peer.rank] = float("inf")
    tensor[-1] = float("nan")
    dist.all_reduce(tensor, group=peer.group)
    return tensor


@case
def all_reduce_transposed(peer: Peer) -> Any:
    tensor = peer.tensor(30, 40).t()
    dist.all_reduce(tensor, group=peer.group)
    return tensor


@case
def all_reduce_sparse(peer: Peer) -> Any:
    indices = torch.tensor([[peer.rank, peer.rank + 1]])
    tensor = torch.sparse_coo_tensor(indices, peer.tensor(2, 3), (peer.size + 1, 3))
    dist.all_reduce(tensor, group=peer.group)
    return tensor


@case
def all_reduce_coalesced(peer: Peer) -> Any:
    tensors = [peer.tensor(5), peer.tensor(300, 300), peer.tensor(150_000)]
    dist.all_reduce_coalesced(tensors, group=peer.group)
    return tensors


@case
def all_reduce_coalesced_maximum_asynchronous(peer: Peer) -> Any:
    tensors = [peer.tensor(5, dtype=torch.int64), peer.tensor(8, dtype=torch.int64)]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX, peer.group, async_op=True).wait()
    return tensors


@case
def all_reduce_in_coalescing_manager(peer: Peer) -> Any:
    tensors = [peer.tensor(5), peer.tensor(8)]
    with dist.distributed_c10d._coalescing_manager(peer.group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=peer.group)
    return tensors


def _reduce(peer: Peer, op: str) -> Any:
    tensors = [peer.tensor(4, 3) for _ in range(peer.size)]
    for destination, tensor in enumerate(tensors):
        dist.reduce(tensor, op=getattr(dist.ReduceOp, op), group_dst=destination, group=peer.group)
    # The other ranks' tensors are undefined after reduce.
    return tensors[peer.rank]


for _op in OPS:
    CASES[f"reduce {_op}"] = partial(_reduce, op=_op)


def _reduce_scatter(peer: Peer, op: str) -> Any:
    output = torch.empty(4, 3)
    inputs = [peer.tensor(4, 3) for _ in range(peer.size)]
    dist.reduce_scatter(output, inputs, getattr(dist.ReduceOp, op), peer.group)
    return output


def _reduce_scatter_tensor(peer: Peer, op: str) -> Any:
    output = torch.empty(40, 30)
    inputs = peer.tensor(40 * peer.size, 30)
    dist.reduce_scatter_tensor(output, inputs, getattr(dist.ReduceOp, op), peer.group)
    return output


for _op in ("SUM", "AVG", "MAX"):
    CASES[f"reduce_scatter {_op}"] = partial(_reduce_scatter, op=_op)
    CASES[f"reduce_scatter_tensor {_op}"] = partial(_reduce_scatter_tensor, op=_op)
