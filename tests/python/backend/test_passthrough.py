# SPDX-License-Identifier: BSD-3-Clause
"""All collectives that are not compressed give the inner backend's results, bit for bit.

What all_reduce does with tensors of other kinds is in hostile/test_odd_tensors.py.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import torch_powersgd as tp
from support.deadline import OPERATION
from support.on_ranks import on_ranks
from support.tensors import bits

SCOPES = ("backward", "never")
# Gloo may refuse these, depending on its release. An error of any other case would mean that the
# case itself is wrong and compares nothing.
MAY_RAISE = re.compile("AVG|BAND|BOR|BXOR|wrong")
if torch.__version__ < "2.12":  # Gloo lacked it.
    MAY_RAISE = re.compile(f"{MAY_RAISE.pattern}|all_to_all$")


class Peer:
    """One rank's side of a case. Its random tensors differ by rank and by case."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.random = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.rank)

    def tensor(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def integers(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, 5, shape, generator=self.random)

    def tensors(self, *shape: int) -> list[torch.Tensor]:
        """One tensor for each rank."""
        return [self.tensor(*shape) for _ in range(self.size)]


# A case uses a collective in a process group and returns what it made.
CASES: dict[str, Callable[[Peer], Any]] = {}


def case(function: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    CASES[function.__name__] = function
    return function


def _all_reduce(peer: Peer, op: Any, integers: bool = False) -> Any:
    tensor = peer.integers(7, 5) if integers else peer.tensor(7, 5)
    dist.all_reduce(tensor, op, peer.group)
    return tensor


def _reduce(peer: Peer, op: Any) -> Any:
    tensors = peer.tensors(4, 3)
    for destination, tensor in enumerate(tensors):
        dist.reduce(tensor, op=op, group_dst=destination, group=peer.group)
    return tensors[peer.rank]  # those of the other ranks are undefined


def _reduce_scatter(peer: Peer, op: Any) -> Any:
    outputs = [torch.empty(4, 3), torch.empty(40, 30)]
    dist.reduce_scatter(outputs[0], peer.tensors(4, 3), op, peer.group)
    dist.reduce_scatter_tensor(outputs[1], peer.tensor(40 * peer.size, 30), op, peer.group)
    return outputs


for _name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
    _op = getattr(dist.ReduceOp, _name)
    CASES[f"all_reduce {_name}"] = partial(_all_reduce, op=_op)
    CASES[f"all_reduce {_name} of integers"] = partial(_all_reduce, op=_op, integers=True)
    CASES[f"reduce {_name}"] = partial(_reduce, op=_op)
    CASES[f"reduce_scatter {_name}"] = partial(_reduce_scatter, op=_op)


@case
def all_reduce_coalesced(peer: Peer) -> Any:
    tensors = [peer.tensor(5), peer.tensor(300, 300), peer.tensor(150_000)]
    dist.all_reduce_coalesced(tensors, group=peer.group)
    integers = [peer.integers(5), peer.integers(8)]
    dist.all_reduce_coalesced(integers, dist.ReduceOp.MAX, peer.group, async_op=True).wait()
    managed = [peer.tensor(5), peer.tensor(8)]
    with dist.distributed_c10d._coalescing_manager(peer.group):
        for tensor in managed:
            dist.all_reduce(tensor, group=peer.group)
    return [tensors, integers, managed]


@case
def wrong_dtypes_coalesced(peer: Peer) -> Any:
    peer.group.allreduce_coalesced([peer.tensor(3), peer.integers(3)]).wait()


@case
def wrong_root(peer: Peer) -> Any:
    return dist.broadcast(peer.tensor(3), group_src=peer.size, group=peer.group)


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


@case
def batch_isend_irecv(peer: Peer) -> Any:
    received = [torch.empty(4), torch.empty(50_000)]
    following, preceding = (peer.rank + 1) % peer.size, (peer.rank - 1) % peer.size
    operations = []
    for tag, tensor in enumerate(received):
        to: dict[str, Any] = {"group": peer.group, "tag": tag}
        sent = peer.tensor(tensor.numel())
        operations.append(dist.P2POp(dist.isend, sent, group_peer=following, **to))
        operations.append(dist.P2POp(dist.irecv, tensor, group_peer=preceding, **to))
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


@case
def object_collectives(peer: Peer) -> Any:
    mine = {"rank": peer.rank, "text": "x" * (peer.rank + 1)}
    gathered: list[Any] = [None] * peer.size
    dist.all_gather_object(gathered, mine, peer.group)
    everyone = [mine, "second"] if peer.rank == 1 else [None, None]
    dist.broadcast_object_list(everyone, group_src=1, group=peer.group)
    return [gathered, everyone]


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


def _plain(value: Any) -> Any:
    """Replaces tensors by their shape and bits: NaN equals itself, -0 is not 0."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, bits(value)
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _outcome(name: str, group: dist.ProcessGroup) -> Any:
    try:
        return _plain(CASES[name](Peer(group, name)))
    except Exception as error:  # an error is part of the behavior
        return type(error)


@on_ranks(3)
def test_all_collectives_give_what_gloo_gives(rank: int) -> None:
    gloo: Any = dist.new_group(backend="gloo")
    groups: list[Any] = []
    for scope in SCOPES:
        options = tp.Options.hook_defaults(scope=scope, start_powerSGD_iter=0)
        groups.append(dist.new_group(backend="cpu:powersgd", pg_options=options))
    raised = []
    for name in CASES:
        expected = _outcome(name, gloo)
        assert [_outcome(name, group) for group in groups] == [expected] * len(groups), name
        if isinstance(expected, type):
            raised.append(name)
    assert [name for name in raised if not MAY_RAISE.search(name)] == []
    assert "all_reduce BAND" in raised, "Gloo lacks some calls"
    for group in groups:
        assert tp.stats(group)["compressed_calls"] == 0
