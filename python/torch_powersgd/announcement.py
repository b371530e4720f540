# SPDX-License-Identifier: BSD-3-Clause
"""The few lines that a user must see whether or not the program configures logging."""

from __future__ import annotations

import logging
import sys

from torch_powersgd._core import _C
from torch_powersgd.options import Options

logger = logging.getLogger("torch_powersgd")


def say(message: str) -> None:
    """Logs at level INFO; without any logging handler, writes to stderr.

    Python shows only warnings by default, and this is none.
    """
    if logger.hasHandlers():
        logger.info(message)
    else:
        print(f"torch_powersgd: {message}", file=sys.stderr, flush=True)


def announce(model: _C.AttachedModel, options: Options, size: int) -> None:
    """Says how much of a model is compressed, what a step sends, and from which step on."""
    if size == 1:
        say("attached; the group has one rank, so nothing is sent")
        return
    outline = model.outline()
    rank, start = options.matrix_approximation_rank, options.start_powerSGD_iter
    if options.scope == "never":
        say("attached; scope='never' compresses nothing")
        return
    if outline.compressed_parameters == 0:
        logger.warning(
            "no parameter is compressed at matrix_approximation_rank=%d: the factors of none are "
            "smaller than the gradient by min_compression_rate=%g. Use a lower rank",
            rank,
            options.min_compression_rate,
        )
        return
    share = 100 * outline.compressed_numel / outline.numel
    say(
        f"{outline.compressed_parameters} of {outline.parameters} parameters ({share:.1f} % of the "
        f"elements) are compressed at rank {rank}; a step sends {_megabytes(outline.bytes_after)} "
        f"in place of {_megabytes(outline.bytes_before)}, from step {start} on"
    )


def _megabytes(size: int) -> str:
    megabytes = size / 1e6
    return f"{megabytes:,.0f} MB" if megabytes >= 1000 else f"{megabytes:.3g} MB"
