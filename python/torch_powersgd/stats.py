# SPDX-License-Identifier: BSD-3-Clause
"""Statistics: steps, bytes and seconds of a group, or of what was attached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.group_backends import find_backends, group_or_default

SOON = 20  # No notice if compression starts within this many steps.


def stats(group: dist.ProcessGroup | None = None, *, flat: bool = False) -> dict[str, Any]:
    """Returns this process's counts of a group since it was created. It is not collective.

    They cover everything that was reduced in the group, attached or not. For the counts of one
    module and its layers, use ``Compression.stats`` of the handle that ``attach`` returned.

    Args:
        group: The process group. None is the default group.
        flat: Whether to return only numbers, as in ``Compression.stats``.

    Returns:
        The dictionary of ``Compression.stats`` without residuals and layers. ``compressing``:
        whether anything was compressed. ``starts_at``: the first step of any attached module that
        is.

    Raises:
        ValueError: If the group has no powersgd backend.
    """
    backends = find_backends(group)
    for backend in backends:
        notify_if_not_started(backend, log.of(group_or_default(group)))
    starts = [start for start in (backend.starts_at() for backend in backends) if start is not None]
    total = {
        "compressing": any(backend.compressing() for backend in backends),
        "starts_at": min(starts, default=None),
        **_with_ratios(_sum([backend.stats() for backend in backends])),
    }
    return dict(_scalars(total)) if flat else total


def of_attached(
    reducer: _C.BucketReducer, per_layer: bool, residual_norms: bool, flat: bool
) -> dict[str, Any]:
    """Returns the counts of what was attached, as ``Compression.stats`` documents them."""
    total = {
        "compressing": reducer.compressing,
        "starts_at": reducer.starts_at,
        **_with_ratios(reducer.stats()),
        "steps": reducer.states.step,
    }
    layers = reducer.states.layers() if residual_norms or per_layer else []
    if residual_norms:
        total["residual_norms"] = {layer.name: layer.residual for layer in layers}
    if per_layer:
        total["layers"] = {layer.name: _last_step(layer) for layer in layers}
    return dict(_scalars(total)) if flat else total


def notify_if_not_started(counted: _C.BackendPowerSGD | _C.BucketReducer, say: log.Log) -> None:
    """Logs once if training runs long before compression starts."""
    if message := counted.not_started(SOON):
        say.notice(message)


def _last_step(layer: _C.LayerStats) -> dict[str, float | None]:
    return {
        "rows": layer.rows,
        "cols": layer.cols,
        "rank": layer.rank,
        "bytes_before": layer.bytes_before,
        "bytes_after": layer.bytes_after,
        "residual": layer.residual,
        "gradient": layer.gradient,
        "residual_ratio": layer.residual / layer.gradient if layer.gradient else None,
        "captured": layer.captured,
    }


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sums by name, including those of nested dictionaries."""
    first = parts[0]
    return {
        name: _sum([part[name] for part in parts])
        if isinstance(value, dict)
        else sum(part[name] for part in parts)
        for name, value in first.items()
    }


def _with_ratios(counts: dict[str, Any]) -> dict[str, Any]:
    before, after = counts.pop("compressed_bytes_before"), counts.pop("compressed_bytes_after")
    counts["ratio"] = ratio(counts["bytes_before"], counts["bytes_after"])
    counts["compressed_ratio"] = ratio(before, after)
    return counts


def ratio(before: int, after: int) -> float:
    """Returns how many times fewer bytes were sent."""
    return before / after if after else 1.0


def _scalars(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", float(value)
