# SPDX-License-Identifier: BSD-3-Clause
"""Properties of NCCL alone: streams, CUDA graphs, and collectives that pass through."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support.cuda_ranks import WORLD_SIZE, bits, needs_cuda, options_of, run
from support.groups import compress, world
from support.synthetic import gradient

pytestmark = needs_cuda


def _asynchronous(rank: int) -> tuple[list[bool], list[bool], float, float]:
    tensors = [gradient([300, 400], rank, i).cuda() for i in range(6)]
    for tensor in tensors[:3]:
        compress(tensor)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second before the next kernels
    start = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    works = [compress(tensor, async_op=True) for tensor in tensors[3:]]
    ended = [work.is_completed() for work in works]
    for work in works:
        work.wait()
    torch.cuda.set_sync_debug_mode("default")
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return ended, [work.is_completed() for work in works], host, time.perf_counter() - start


def test_the_host_never_waits_for_the_device() -> None:
    for ended, in_the_end, host, whole in run(_asynchronous):
        assert ended == [False] * 3
        assert in_the_end == [True] * 3
        assert host < whole / 2


def _captured(rank: int, options: tp.Options) -> tuple[list[bool], bytes]:
    """Replays against the same steps of another group that runs them one by one."""
    plain = dist.new_group(backend="cuda:powersgd", pg_options=options)

    def fed(i: int) -> torch.Tensor:
        return gradient([300, 4000], rank, i).cuda()

    static = torch.zeros(300, 4000, device="cuda")
    for i in range(2):  # not captured, because NCCL allocates its connections once
        static.copy_(fed(i))
        compress(static)
        compress(fed(i), group=plain)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        compress(static)
    same = []
    for i in range(2, 5):
        static.copy_(fed(i))
        graph.replay()
        torch.cuda.synchronize()
        compress(expected := fed(i), group=plain)
        same.append(bool(static.equal(expected)))
    torch.cuda.synchronize()
    del graph  # before the group: the communicator waits for the graphs that hold it
    return same, bits(static)


# Hosts of two ranks sum the last one's payloads in two levels.
@pytest.mark.parametrize(
    ("rank", "wire", "hosts"), [(2, None, ""), (40, None, ""), (16, "int8", "0101")]
)
def test_a_compressed_all_reduce_in_a_cuda_graph(rank: int, wire: str | None, hosts: str) -> None:
    options = options_of(matrix_approximation_rank=rank, wire_dtype=wire)
    size = len(hosts) or WORLD_SIZE
    found = run(_captured, options, options=options, world_size=size, hosts=hosts)
    assert all(same == [True] * 3 and last == found[0][1] for same, last in found)


def _moved(group: dist.ProcessGroup, rank: int, name: str) -> list[torch.Tensor]:
    """The results of one collective on the GPU."""
    other = 1 - rank

    def fed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return gradient(shape, name, rank).mul(8).to(dtype).cuda()

    if name.startswith("all_reduce"):
        _, op, dtype = name.split()
        tensor = fed(200, 700, dtype=getattr(torch, dtype))
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group)
        return [tensor]
    mine, out = fed(64, 50), torch.zeros(64, 50, device="cuda")
    both = [torch.zeros(64, 50, device="cuda") for _ in range(WORLD_SIZE)]
    if name == "premultiplied":
        dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5), group)
        return [mine]
    if name == "coalesced":
        with dist._coalescing_manager(
            group, device=torch.device("cuda", 0), async_ops=True
        ) as works:
            dist.all_reduce(mine, group=group)
            dist.all_reduce(out.add_(rank), group=group)
        works.wait()
        return [mine, out]
    if name == "send_recv":
        pair = [
            dist.P2POp(dist.isend, mine, other, group),
            dist.P2POp(dist.irecv, out, other, group),
        ]
        transfers: list[Any] = dist.batch_isend_irecv(pair)
        for work in transfers:
            work.wait()
        return [out]
    whole = torch.zeros(128, 50, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(mine, 1, group),
        "reduce": lambda: dist.reduce(mine, 0, group=group),
        "all_gather": lambda: dist.all_gather(both, mine, group),
        "all_gather_into": lambda: dist.all_gather_into_tensor(whole, mine, group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(out[:32], mine, group=group),
        "all_to_all": lambda: dist.all_to_all_single(out, mine, group=group),
        "gather": lambda: dist.gather(mine, both if rank == 0 else None, 0, group),
        "scatter": lambda: dist.scatter(out, [mine, mine + 1] if rank == 0 else None, 0, group),
        "barrier": lambda: dist.barrier(group),
    }
    calls[name]()
    return [mine, out, whole, *both] if name != "reduce" or rank == 0 else []


COLLECTIVES = [
    *(
        f"all_reduce {op} {dtype}"
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
        for dtype in ("float32", "bfloat16", "float64", "int32")
        if (op, dtype) != ("AVG", "int32")
    ),
    *("premultiplied", "coalesced", "send_recv", "broadcast", "reduce", "all_gather"),
    "all_gather_into",
    *("reduce_scatter", "all_to_all", "gather", "scatter", "barrier"),
]


def _pass_through(rank: int) -> tuple[list[str], list[int]]:
    groups = [
        dist.new_group(backend="nccl"),
        world(),
        dist.new_group(backend="cuda:powersgd", pg_options=options_of(scope="never")),
    ]
    different = []
    for name in COLLECTIVES:
        results = []
        for group in groups:
            tensors = _moved(group, rank, name)
            torch.cuda.synchronize()
            results.append([bits(tensor) for tensor in tensors])
        different += [name for result in results[1:] if result != results[0]]
    return different, [tp.stats(group)["compressed_calls"] for group in groups[1:]]


def test_what_is_not_compressed_is_as_nccl_has_it() -> None:
    for different, calls in run(_pass_through):
        assert different == []
        assert calls == [0, 0]
