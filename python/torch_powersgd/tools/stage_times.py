# SPDX-License-Identifier: BSD-3-Clause
"""The milliseconds that the stages take for each parameter alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from torch_powersgd._core import _C
from torch_powersgd.matrices import as_reals
from torch_powersgd.options import Options, to_core
from torch_powersgd.tools.footprint import Shape, elements_of, matrices_of

REPEATS = 3


def milliseconds_of(
    parameters: Sequence[torch.Tensor], options: Options, group: dist.ProcessGroup
) -> list[float]:
    """The stages of each parameter, in milliseconds on the slowest rank. Collective.

    Parameters that are sent raw take 0. Those of one shape and dtype are measured once.
    """
    kinds = [(tuple(real.shape), real.dtype) for real in map(as_reals, parameters)]
    device = parameters[0].device
    mine = {
        (shape, dtype): _milliseconds(list(shape), dtype, options, device, group)
        for shape, dtype in dict.fromkeys(kinds)
    }
    slowest = torch.tensor(list(mine.values()), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    of_kind = dict(zip(mine, slowest.tolist(), strict=True))
    return [of_kind[kind] for kind in kinds]


def _milliseconds(
    shape: Shape,
    dtype: torch.dtype,
    options: Options,
    device: torch.device,
    group: dist.ProcessGroup,
) -> float:
    """The stages on this rank, while all others compute as well."""
    if not matrices_of([shape], options):
        return 0.0
    compressor = _C.BucketCompressor([shape], to_core(options), dtype, device.type)
    gradient = torch.randn(elements_of([shape]), device=device, dtype=dtype)
    times = []
    for step in range(REPEATS + 1):  # the first one allocates
        dist.barrier(group)
        start = time.perf_counter()
        compressor.project(gradient, step)
        compressor.orthogonalize()
        compressor.back_project()
        compressor.reconstruct()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[1:])
