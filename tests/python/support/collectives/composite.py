# SPDX-License-Identifier: BSD-3-Clause
"""Cases of errors, and of the functions that torch builds on its collectives."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable

from support.collectives.case import Peer, case


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
def send_and_recv_object_list(peer: Peer) -> Any:
    objects = [{"from": peer.rank}, [1, 2]] if peer.rank == 0 else [None, None]
    if peer.rank == 0:
        dist.send_object_list(objects, group_dst=1, group=peer.group)
    elif peer.rank == 1:
        dist.recv_object_list(objects, group_src=0, group=peer.group)
    return objects


@case
def functional_all_reduce(peer: Peer) -> Any:
    results = [
        functional.all_reduce(peer.tensor(5), op, peer.group) for op in ("sum", "avg", "max")
    ]
    results += functional.all_reduce_coalesced([peer.tensor(3), peer.tensor(4)], "sum", peer.group)
    return [functional.wait_tensor(result) for result in results]


@case
def functional_all_gather(peer: Peer) -> Any:
    results = [functional.all_gather_tensor(peer.tensor(4, 3), 0, peer.group)]
    results.append(functional.all_gather_tensor(peer.tensor(4, 3), 1, peer.group))
    return [functional.wait_tensor(result) for result in results]


@case
def functional_all_gather_into_tensor_coalesced(peer: Peer) -> Any:
    inputs = [peer.tensor(4), peer.tensor(2, 3)]
    results = functional.all_gather_into_tensor_coalesced(inputs, peer.group)
    return [functional.wait_tensor(result) for result in results]


@case
def functional_reduce_scatter(peer: Peer) -> Any:
    result = functional.reduce_scatter_tensor(peer.tensor(4 * peer.size), "sum", 0, peer.group)
    return functional.wait_tensor(result)


@case
def functional_reduce_scatter_tensor_coalesced(peer: Peer) -> Any:
    inputs = [peer.tensor(2 * peer.size), peer.tensor(3 * peer.size)]
    results = functional.reduce_scatter_tensor_coalesced(inputs, "sum", [0, 0], peer.group)
    return [functional.wait_tensor(result) for result in results]


@case
def functional_all_to_all_single(peer: Peer) -> Any:
    result = functional.all_to_all_single(peer.tensor(2 * peer.size), None, None, peer.group)
    return functional.wait_tensor(result)


@case
def functional_broadcast(peer: Peer) -> Any:
    return functional.wait_tensor(functional.broadcast(peer.tensor(5), 1, peer.group))


@case
def functional_permute_tensor(peer: Peer) -> Any:
    order = [(rank + 1) % peer.size for rank in range(peer.size)]
    return functional.wait_tensor(functional.permute_tensor(peer.tensor(5), order, peer.group))


@case
def differentiable_collectives(peer: Peer) -> Any:
    leaf = peer.tensor(6).requires_grad_()
    reduced = differentiable.all_reduce(leaf * (peer.rank + 1), group=peer.group)
    gathered = differentiable.all_gather(leaf * 2, group=peer.group)
    (reduced.square().sum() + sum(part.sum() for part in gathered)).backward()
    return [reduced, *gathered, leaf.grad]


@case
def wrong_arguments(peer: Peer) -> Any:
    return dist.all_gather([torch.empty(3)], peer.tensor(3), peer.group)


@case
def wrong_root(peer: Peer) -> Any:
    return dist.broadcast(peer.tensor(3), group_src=peer.size, group=peer.group)


@case
def different_dtypes_coalesced(peer: Peer) -> Any:
    tensors = [peer.tensor(3), peer.tensor(3, dtype=torch.int64)]
    peer.group.allreduce_coalesced(tensors).wait()
    return tensors
