# SPDX-License-Identifier: BSD-3-Clause
"""Cases of the collectives that move data and compute nothing, point to point ones among them."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from support.collectives.case import CASES, DTYPES, Peer, case


def _broadcast(peer: Peer, dtype: torch.dtype) -> Any:
    tensors = [peer.tensor(4, 3, dtype=dtype) for _ in range(peer.size)]
    for source, tensor in enumerate(tensors):
        dist.broadcast(tensor, group_src=source, group=peer.group)
    return tensors


def _all_gather(peer: Peer, dtype: torch.dtype) -> Any:
    outputs = [peer.tensor(4, 3, dtype=dtype) for _ in range(peer.size)]
    dist.all_gather(outputs, peer.tensor(4, 3, dtype=dtype), peer.group)
    return outputs


for _dtype in DTYPES:
    _suffix = str(_dtype).removeprefix("torch.")
    CASES[f"broadcast {_suffix}"] = partial(_broadcast, dtype=_dtype)
    CASES[f"all_gather {_suffix}"] = partial(_all_gather, dtype=_dtype)


@case
def all_gather_of_unequal_sizes(peer: Peer) -> Any:
    outputs = [peer.tensor(rank + 1) for rank in range(peer.size)]
    dist.all_gather(outputs, peer.tensor(peer.rank + 1), peer.group)
    return outputs


@case
def all_gather_coalesced(peer: Peer) -> Any:
    inputs = [peer.tensor(4), peer.tensor(2, 3)]
    outputs = [[torch.empty_like(tensor) for tensor in inputs] for _ in range(peer.size)]
    dist.all_gather_coalesced(outputs, inputs, peer.group)
    return outputs


@case
def all_gather_into_tensor(peer: Peer) -> Any:
    outputs = [torch.empty(4 * peer.size, 3), torch.empty(4 * peer.size, 3)]
    dist.all_gather_into_tensor(outputs[0], peer.tensor(4, 3), peer.group)
    dist.all_gather_into_tensor(outputs[1], peer.tensor(4, 3), peer.group, async_op=True).wait()
    return outputs


@case
def all_gather_into_stacked_tensor(peer: Peer) -> Any:
    output = torch.empty(peer.size, 4, 3)
    dist.all_gather_into_tensor(output, peer.tensor(4, 3), peer.group)
    return output


@case
def gather(peer: Peer) -> Any:
    results = []
    for destination in range(peer.size):
        mine = [torch.empty(4, 3) for _ in range(peer.size)] if peer.rank == destination else None
        dist.gather(peer.tensor(4, 3), mine, group_dst=destination, group=peer.group)
        results.append(mine)
    return results


@case
def scatter(peer: Peer) -> Any:
    results = []
    for source in range(peer.size):
        given = [peer.tensor(4, 3) for _ in range(peer.size)] if peer.rank == source else None
        output = torch.empty(4, 3)
        dist.scatter(output, given, group_src=source, group=peer.group)
        results.append(output)
    return results


@case
def all_to_all(peer: Peer) -> Any:
    outputs = [torch.empty(3) for _ in range(peer.size)]
    dist.all_to_all(outputs, [peer.tensor(3) for _ in range(peer.size)], peer.group)
    return outputs


@case
def all_to_all_single(peer: Peer) -> Any:
    output = torch.empty(2 * peer.size, 3)
    dist.all_to_all_single(output, peer.tensor(2 * peer.size, 3), group=peer.group)
    return output


@case
def all_to_all_single_with_splits(peer: Peer) -> Any:
    # Rank r sends s + 1 rows to rank s.
    sent = [other + 1 for other in range(peer.size)]
    received = [peer.rank + 1] * peer.size
    output = torch.empty(sum(received), 3)
    dist.all_to_all_single(output, peer.tensor(sum(sent), 3), received, sent, peer.group)
    return output


@case
def barrier(peer: Peer) -> Any:
    dist.barrier(peer.group)
    dist.barrier(peer.group, async_op=True).wait()
    return dist.get_world_size(peer.group)


@case
def monitored_barrier(peer: Peer) -> Any:
    # dist.monitored_barrier refuses every backend that is not called "gloo".
    group: Any = peer.group  # its type lacks the method
    group.monitored_barrier(timedelta(seconds=30))
    group.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)
    return dist.get_world_size(peer.group)


@case
def send_and_recv(peer: Peer) -> Any:
    received = torch.empty(4, 3)
    if peer.rank % 2 == 0:
        dist.send(peer.tensor(4, 3), group_dst=peer.following, group=peer.group, tag=7)
        source = dist.recv(received, group_src=peer.preceding, group=peer.group, tag=7)
    else:
        source = dist.recv(received, group_src=peer.preceding, group=peer.group, tag=7)
        dist.send(peer.tensor(4, 3), group_dst=peer.following, group=peer.group, tag=7)
    return [received, source]


@case
def isend_and_irecv(peer: Peer) -> Any:
    received = [torch.empty(4), torch.empty(4)]
    works: list[Any] = []
    for tag, tensor in enumerate(received):
        works.append(
            dist.isend(peer.tensor(4), group_dst=peer.following, group=peer.group, tag=tag)
        )
        works.append(dist.irecv(tensor, group_src=peer.preceding, group=peer.group, tag=tag))
    for work in works:
        work.wait()
    return received


@case
def batch_isend_irecv(peer: Peer) -> Any:
    received = [torch.empty(4), torch.empty(50_000)]
    operations = []
    for tensor in received:
        sent = peer.tensor(tensor.numel())
        operations.append(dist.P2POp(dist.isend, sent, group=peer.group, group_peer=peer.following))
        operations.append(
            dist.P2POp(dist.irecv, tensor, group=peer.group, group_peer=peer.preceding)
        )
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


@case
def recv_from_any_source(peer: Peer) -> Any:
    if peer.rank != 0:
        dist.send(peer.tensor(4), group_dst=0, group=peer.group)
        return None
    received = {}
    for _ in range(peer.size - 1):
        tensor = torch.empty(4)
        received[dist.recv(tensor, group=peer.group)] = tensor
    return [[source, received[source]] for source in sorted(received)]


@case
def irecv_from_any_source(peer: Peer) -> Any:
    if peer.rank != 0:
        dist.send(peer.tensor(4), group_dst=0, group=peer.group, tag=3)
        return None
    tensors = [torch.empty(4) for _ in range(peer.size - 1)]
    works: list[Any] = [dist.irecv(tensor, group=peer.group, tag=3) for tensor in tensors]
    for work in works:
        work.wait()
    return sorted(tensor.tolist() for tensor in tensors)
