# SPDX-License-Identifier: BSD-3-Clause
"""The bytes that a step sends and the memory that compression takes, from the shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import _compute_bucket_assignment_by_size

from torch_powersgd._core import _C
from torch_powersgd.options import Options, to_core

# DDP's defaults: the first bucket, and all others.
BUCKET_BYTES = [1 << 20, 25 << 20]

Shape = list[int]
Layout = list[list[Shape]]  # the shapes of each bucket


@dataclass(frozen=True)
class Footprint:
    """The costs of one step on one process.

    The memory is what compression adds. It is also the peak, because a step allocates nothing. The
    tables depend on the kernels: CUDA's if this build has them, otherwise the CPU's.

    Attributes:
        gradient_bytes: the bytes of the gradients.
        sent_bytes: the bytes of the payloads, or of the packets that hold them.
        host_bytes: the bytes that leave a host, by all of its processes.
        residual_bytes: the memory of the residuals.
        factor_bytes: the memory of the factors and of the buffers that carry them.
        table_bytes: the memory of the kernels' tables.
        workspace_bytes: the memory of the kernels' workspaces, which all buckets share.
        compressed: the number of compressed parameters.
        compressed_elements: the number of their elements.
    """

    gradient_bytes: int = 0
    sent_bytes: int = 0
    host_bytes: int = 0
    residual_bytes: int = 0
    factor_bytes: int = 0
    table_bytes: int = 0
    workspace_bytes: int = 0
    compressed: int = 0
    compressed_elements: int = 0

    def __add__(self, other: Footprint) -> Footprint:
        mine, others = vars(self), vars(other)
        sums = {name: mine[name] + others[name] for name in mine}
        sums["workspace_bytes"] = max(self.workspace_bytes, other.workspace_bytes)
        return Footprint(**sums)

    @property
    def memory_bytes(self) -> int:
        """All that compression adds."""
        return self.residual_bytes + self.factor_bytes + self.table_bytes + self.workspace_bytes


def assign_buckets(
    tensors: Sequence[torch.Tensor], limits: Sequence[int] = BUCKET_BYTES
) -> list[list[int]]:
    """DDP's own assignment, after it has rebuilt its buckets in the order of backward."""
    if not tensors:
        return []
    last = len(tensors) - 1
    backward = [torch.empty_like(tensor, device="meta") for tensor in tensors][::-1]
    assignment, _ = _compute_bucket_assignment_by_size(backward, list(limits))
    return [[last - i for i in indices] for indices in assignment]


def buckets_of(
    shapes: list[Shape],
    dtype: torch.dtype = torch.float32,
    limits: Sequence[int] = BUCKET_BYTES,
) -> Layout:
    """The shapes of DDP's buckets, for parameters of one dtype.

    ``limits`` are the bytes of the first bucket and of all others.
    """
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    return [[shapes[i] for i in indices] for indices in assign_buckets(tensors, limits)]


def elements_of(shapes: list[Shape]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)


def footprint_of(
    layout: Layout,
    options: Options | None,
    dtype: torch.dtype = torch.float32,
    world_size: int = 2,
    per_host: int = 1,
) -> Footprint:
    """The costs of a model's buckets. Options of None stand for the plain all-reduce."""
    total = Footprint()
    for shapes in layout:
        total += footprint_of_bucket(shapes, options, dtype, world_size, per_host)
    return total


def ring_bytes(size: int, world_size: int) -> int:
    """The bytes that leave a host when a ring averages so many, if its processes are neighbors."""
    return 2 * (world_size - 1) * size // world_size


def matrices_of(
    shapes: list[Shape],
    options: Options,
    dtype: torch.dtype = torch.float32,
    ranks: Sequence[int | None] = (),
) -> list[tuple[int, int, int]]:
    """The rows, the columns and the rank of each parameter that is compressed."""
    core = to_core(options)
    found = [
        (*_C.matrix_shape(shape, []), _C.matrix_rank(shape, core, dtype, rank))
        for shape, rank in zip(shapes, ranks or [None] * len(shapes), strict=True)
    ]
    return [matrix for matrix in found if matrix[2]]


def footprint_of_bucket(
    shapes: list[Shape],
    options: Options | None,
    dtype: torch.dtype,
    world_size: int,
    per_host: int,
    ranks: Sequence[int | None] = (),
) -> Footprint:
    """The costs of a bucket, with the matrix ranks that parameters have of their own."""
    gradient_bytes = elements_of(shapes) * dtype.itemsize
    matrices = matrices_of(shapes, options, dtype, ranks) if options is not None else []
    if options is None or not matrices:
        # A bucket without a compressed matrix is sent whole, in its own dtype.
        return Footprint(gradient_bytes, gradient_bytes, ring_bytes(gradient_bytes, world_size))
    core = to_core(options)
    device = "cuda" if _C.has_kernels("cuda") else "cpu"
    memory = _C.memory_needs(shapes, core, dtype, device, world_size, per_host, ranks)
    reduced = _C.traffic_of(shapes, core, dtype, device, world_size, per_host, ranks)
    return Footprint(
        gradient_bytes,
        sum(payload.payload_bytes for payload in reduced),
        sum(payload.sent_bytes for payload in reduced),
        memory.residual,
        memory.factors + memory.payloads,
        memory.tables,
        2 * memory.workspace,  # one for each part of a step
        len(matrices),
        sum(n * m for n, m, _ in matrices),
    )
