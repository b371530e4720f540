# SPDX-License-Identifier: BSD-3-Clause
"""Statistics: bytes, steps and seconds of a group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.attach import attached_groups
from torch_powersgd.lookup import find_backends
from torch_powersgd.store_agreement import global_ranks

SOON = 20  # A start of compression within so many steps needs no notice.

_pointed_elsewhere = False


def stats(
    group: dist.ProcessGroup | None = None,
    residual_norms: bool = True,
    flat: bool = False,
    per_layer: bool = False,
) -> dict[str, Any]:
    """Returns counts of this rank since the group was created or ``reset_stats`` was called.

    It is not collective. If steps were trained and compression does not start soon, the group's
    first rank logs that once.

    Args:
        group: The process group. None is the default group.
        residual_norms: Whether to compute the residuals' norms, which takes a pass over the model.
            Without them and ``layers``, ``stats`` is cheap enough to be called in every step.
        flat: Whether to return numbers alone, as ``SummaryWriter`` and the like want them. Names of
            nested entries are joined by "/" (``seconds/project``), and ``starts_at`` is left out
            where it is None.
        per_layer: Whether to return ``layers`` as well. They come from the same pass.

    Returns:
        A dictionary. ``compressing``: whether the next step of an attached model is compressed, or
        where none is attached, whether a gradient has been; ``starts_at``: the step from which
        gradients are compressed, None if none will be.

        ``steps``; ``skipped_steps`` (a gradient was not finite on some rank); ``saturated_steps``
        (a residual was beyond 65504, the largest value of ``residual_dtype=torch.float16``, and was
        cut off there, so that the rest of it is lost); ``differences`` (factors that
        ``check_every`` found to differ between ranks, and mended).

        ``compressed_calls``, ``exact_calls`` (gradients sent whole); ``bytes_before`` of the
        gradients and ``bytes_after`` of this rank's payloads in their place, in the form in which
        they travel; ``ratio`` of the two; ``compressed_ratio``: the ratio of the compressed calls
        alone.

        ``seconds`` per stage; ``residual_norms``: {parameter: Frobenius norm}, where a group of
        several attached models has "i:parameter".

        ``layers``: {parameter: its last step on this rank}. ``rows`` and ``cols`` of its matrix;
        ``rank`` of its factors, 0 if it is sent raw; ``bytes_before`` and ``bytes_after`` of a
        compressed step; ``residual`` and ``gradient``: the Frobenius norms of the residual and of
        the averaged gradient that the step delivered, both in the units of the loss scale;
        ``residual_ratio``: the first over the second; ``captured``: |q|^2 / |M|^2, the share of
        M = gradient + residual that this rank sent. The last three are None where the step
        delivered nothing as factors, and ``captured`` is None without error feedback.

    Raises:
        ValueError: If the group has no powersgd backend.
    """
    backends = find_backends(group)
    _notify_if_not_started(backends)
    starts = [start for start in (backend.starts_at() for backend in backends) if start is not None]
    total: dict[str, Any] = {
        "compressing": any(backend.compressing() for backend in backends),
        "starts_at": min(starts, default=None),
    }
    total |= _sum([backend.stats() for backend in backends])
    if total["compressed_calls"] == 0:
        _point_to_attached(group)
    total["ratio"] = _ratio(total["bytes_before"], total["bytes_after"])
    total["compressed_ratio"] = _ratio(
        total.pop("compressed_bytes_before"), total.pop("compressed_bytes_after")
    )
    if residual_norms or per_layer:
        layers = _layers([model for backend in backends for model in backend.models()])
        if residual_norms:
            total["residual_norms"] = {name: layer.residual for name, layer in layers.items()}
        if per_layer:
            total["layers"] = {name: _last_step(layer) for name, layer in layers.items()}
    return dict(_scalars(total)) if flat else total


def reset_stats(group: dist.ProcessGroup | None = None) -> None:
    """Starts the counts of ``stats`` again from zero. It is not collective.

    Args:
        group: The process group. None is the default group.

    Raises:
        ValueError: If the group has no powersgd backend.
    """
    for backend in find_backends(group):
        backend.reset_stats()


def _layers(models: list[_C.AttachedModel]) -> dict[str, _C.LayerStats]:
    return {
        f"{i}:{layer.name}" if len(models) > 1 else layer.name: layer
        for i, model in enumerate(models)
        for layer in model.layers()
    }


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


def _notify_if_not_started(backends: list[_C.BackendPowerSGD]) -> None:
    for backend in backends:
        message = backend.not_started(SOON) if backend.rank() == 0 else ""
        if message:
            log.notice(message)


def _point_to_attached(group: dist.ProcessGroup | None) -> None:
    """Says once that modules are attached in other groups, if it is the default group's counts."""
    global _pointed_elsewhere
    default, groups = dist.group.WORLD, attached_groups()
    is_elsewhere = groups and group in (None, default) and default not in groups
    if is_elsewhere and dist.get_rank() == 0 and not _pointed_elsewhere:
        _pointed_elsewhere = True
        log.notice(
            "stats() counts the default group, in which no module is attached. One is attached in "
            f"the group of the ranks {list(global_ranks(groups[0]))}: pass that group to stats, "
            "such as mesh.get_group('replicate') or ddp.process_group"
        )


def _sum(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the sums by name, in nested dictionaries as well."""
    first = parts[0]
    return {
        name: _sum([part[name] for part in parts])
        if isinstance(value, dict)
        else sum(part[name] for part in parts)
        for name, value in first.items()
    }


def _ratio(before: int, after: int) -> float:
    return before / after if after else 1.0


def _scalars(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}/")
        elif value is not None:
            yield f"{prefix}{name}", float(value)
