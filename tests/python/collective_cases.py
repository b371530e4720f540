# SPDX-License-Identifier: BSD-3-Clause
"""Every collective of torch.distributed as a function of a process group, and comparable results."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable


@dataclass
class Peer:
    """One rank's side of a case; its random tensors differ by rank and by case."""

    group: dist.ProcessGroup
    rank: int
    size: int
    random: torch.Generator

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            wide = torch.complex128 if dtype.is_complex else torch.float64
            return torch.randn(shape, generator=self.random, dtype=wide).to(dtype)
        return torch.randint(0, 5, shape, generator=self.random).to(dtype)

    @property
    def following(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def preceding(self) -> int:
        return (self.rank - 1) % self.size


CASES: dict[str, Callable[[Peer], Any]] = {}


def case(function: Callable[[Peer], Any]) -> Callable[[Peer], Any]:
    CASES[function.__name__] = function
    return function


def run_case(name: str, group: dist.ProcessGroup) -> Any:
    """The case's results in a form that compares and pickles; an error counts as a result."""
    rank = dist.get_rank(group)
    seed = zlib.crc32(name.encode()) + rank
    peer = Peer(group, rank, dist.get_world_size(group), torch.Generator().manual_seed(seed))
    try:
        return _digest(CASES[name](peer))
    except Exception as error:  # noqa: BLE001 - what is raised is part of the behaviour
        return ("raises", type(error).__name__)


def _digest(value: Any) -> Any:
    """Tensors by dtype, shape and a hash of their bits, so that NaN equals itself and -0 is not 0."""
    if isinstance(value, torch.Tensor) and value.is_sparse:
        value = value.coalesce()
        return ("sparse", _digest(value.indices()), _digest(value.values()))
    if isinstance(value, torch.Tensor):
        bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return (str(value.dtype), tuple(value.shape), hashlib.sha256(bits).hexdigest())
    if isinstance(value, (list, tuple)):
        return [_digest(item) for item in value]
    return value


OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
]


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


def _broadcast(peer: Peer, dtype: torch.dtype) -> Any:
    tensors = [peer.tensor(4, 3, dtype=dtype) for _ in range(peer.size)]
    for source, tensor in enumerate(tensors):
        dist.broadcast(tensor, group_src=source, group=peer.group)
    return tensors


def _reduce(peer: Peer, op: str) -> Any:
    tensors = [peer.tensor(4, 3) for _ in range(peer.size)]
    for destination, tensor in enumerate(tensors):
        dist.reduce(tensor, op=getattr(dist.ReduceOp, op), group_dst=destination, group=peer.group)
    # What reduce leaves in the other ranks' tensors is not defined.
    return tensors[peer.rank]


def _all_gather(peer: Peer, dtype: torch.dtype) -> Any:
    outputs = [peer.tensor(4, 3, dtype=dtype) for _ in range(peer.size)]
    dist.all_gather(outputs, peer.tensor(4, 3, dtype=dtype), peer.group)
    return outputs


for _dtype in DTYPES:
    _suffix = str(_dtype).removeprefix("torch.")
    CASES[f"broadcast {_suffix}"] = partial(_broadcast, dtype=_dtype)
    CASES[f"all_gather {_suffix}"] = partial(_all_gather, dtype=_dtype)
for _op in OPS:
    CASES[f"reduce {_op}"] = partial(_reduce, op=_op)


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
    concatenated, stacked = torch.empty(4 * peer.size, 3), torch.empty(peer.size, 4, 3)
    dist.all_gather_into_tensor(concatenated, peer.tensor(4, 3), peer.group)
    dist.all_gather_into_tensor(stacked, peer.tensor(4, 3), peer.group, async_op=True).wait()
    return [concatenated, stacked]


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
def barriers(peer: Peer) -> Any:
    dist.barrier(peer.group)
    dist.barrier(peer.group, async_op=True).wait()
    dist.monitored_barrier(peer.group)
    dist.monitored_barrier(peer.group, wait_all_ranks=True)
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
    works = []
    for tag, tensor in enumerate(received):
        works.append(dist.isend(peer.tensor(4), group_dst=peer.following, group=peer.group, tag=tag))
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
    works = [dist.irecv(tensor, group=peer.group, tag=3) for tensor in tensors]
    for work in works:
        work.wait()
    return sorted(tensor.tolist() for tensor in tensors)


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
    results = [functional.all_reduce(peer.tensor(5), op, peer.group) for op in ("sum", "avg", "max")]
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
