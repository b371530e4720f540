# SPDX-License-Identifier: BSD-3-Clause
"""The line that ``attach`` logs."""

from __future__ import annotations

import torch.distributed as dist

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.options import Options
from torch_powersgd.units import size_text


def announce(model: _C.BucketReducer, group: dist.ProcessGroup) -> None:
    """Logs how much of a model is compressed, what a step sends, and from which step on.

    Only the first rank of the group logs it.
    """
    if group.rank() != 0:
        return
    if group.size() == 1:
        log.notice("attached; the group has one rank, so nothing is sent")
        return
    outline, options = model.states.outline(), Options._from_core(model.states.options)
    rank, start = options.matrix_approximation_rank, options.start_powerSGD_iter
    rate = options.min_compression_rate
    if options.scope == "never":
        log.notice("attached; scope='never' compresses nothing")
        return
    if outline.compressed_parameters == 0:
        log.warning(
            f"no parameter is compressed at matrix_approximation_rank={rank}: the factors of none "
            f"are smaller than the gradient by min_compression_rate={rate:g}. Use a lower rank"
        )
        return
    share = 100 * outline.compressed_numel / outline.numel
    log.notice(
        f"{outline.compressed_parameters} of {outline.parameters} parameters ({share:.1f} % of the "
        f"elements) are compressed at rank {rank}; a step sends {size_text(outline.bytes_after)} "
        f"in place of {size_text(outline.bytes_before)}, from step {start} on"
    )
