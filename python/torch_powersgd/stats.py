# SPDX-License-Identifier: BSD-3-Clause
"""What the backend did."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torch_powersgd._backend import find_backends


def stats(group: dist.ProcessGroup | None = None, residual_norms: bool = True) -> dict[str, Any]:
    """What this rank did since the group was created. Not collective.

    Args:
        group: None: the default group.
        residual_norms: also compute the residuals' norms, one pass over the model.

    Returns:
        ``steps``; ``skipped_steps`` (a gradient was not finite on some rank); ``saturated_steps``
        (a residual was beyond 65504, the largest value of ``residual_dtype=torch.float16``, and
        was cut off there: the rest of it is lost); ``differences``
        (factors that ``check_every`` found to differ between ranks, and mended);
        ``compressed_calls``, ``exact_calls`` (gradients sent whole); ``bytes_before`` of the
        gradients and ``bytes_after`` of what was handed to the inner backend in their place;
        ``ratio`` of the two; ``seconds`` per stage; ``residual_norms``: {parameter: Frobenius
        norm}, where a group of several attached models has "i:parameter".

    Raises:
        ValueError: if the group has no powersgd backend.
    """
    backends = find_backends(group)
    total = backends[0].stats()
    for backend in backends[1:]:
        for key, value in backend.stats().items():
            if key == "seconds":
                for stage, seconds in value.items():
                    total[key][stage] += seconds
            else:
                total[key] += value
    sent = total["bytes_after"]
    total["ratio"] = total["bytes_before"] / sent if sent else 1.0
    if residual_norms:
        models = [model for backend in backends for model in backend.models()]
        total["residual_norms"] = {
            f"{i}:{name}" if len(models) > 1 else name: norm
            for i, model in enumerate(models)
            for name, norm in model.residual_norms().items()
        }
    return total
