# SPDX-License-Identifier: BSD-3-Clause
"""Statistics: steps, bytes and seconds of a group or of what was attached, as numbers and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.group_backends import find_backends, group_or_default
from torch_powersgd.option_values import dtype_name
from torch_powersgd.options import Options, rank_text
from torch_powersgd.units import processes_text, size_text

if TYPE_CHECKING:
    from torch_powersgd.attachment import Attachment

_COMPUTED = ("project", "orthogonalize", "back_project", "reconstruct")

SOON = 20  # No notice if compression starts within this many steps.


def stats(group: dist.ProcessGroup | None = None, *, flat: bool = False) -> dict[str, Any]:
    """Returns this process's counts of a group since it was created. It is not collective.

    They cover everything that was reduced in the group, attached or not, but not the averages of
    local steps with a ``density``. For the counts of one module and its layers, use the ``stats``
    of what ``attach``, ``LocalSGD`` or ``DiLoCo`` returned.

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
    attachment: Attachment, per_layer: bool, residual_norms: bool, flat: bool
) -> dict[str, Any]:
    """Returns the counts of what was attached, as ``Compression.stats`` documents them."""
    states = attachment.reducer.states
    total = {
        "compressing": attachment.compressing,
        "starts_at": attachment.starts_at,
        **_with_ratios(attachment.counts()),
        "steps": states.step,
    }
    layers = {}
    if residual_norms or per_layer:
        layers = {layer.name: _last_step(layer) for layer in states.layers()}
        if attachment.sparse is not None:
            for i, counts in attachment.sparse.by_tensor().items():
                layers[states.names[i]] |= counts
    if residual_norms:
        total["residual_norms"] = {name: layer["residual"] for name, layer in layers.items()}
    if per_layer:
        total["layers"] = layers
    return dict(_scalars(total)) if flat else total


def summary(attachment: Attachment, options: Options) -> str:
    """Says in up to four lines what is compressed, what was sent, and whether that helps."""
    states, counts, group = attachment.reducer.states, attachment.counts(), attachment.group
    outline, sparse = states.outline(), attachment.sparse
    wire = "float32" if options.wire_dtype is None else dtype_name(options.wire_dtype)
    if group.size() == 1 and not counts["bytes_before"]:
        return f"Compression over 1 process, which has nothing to send\n  step {states.step}"
    compressed = outline.compressed_parameters if sparse is None else len(sparse.held())
    by = f"matrix rank {rank_text(options)} in {wire}" if sparse is None else sparse.described
    lines = [
        f"Compression over {processes_text(group.size())}: {compressed} of {outline.parameters} "
        f"parameters at {by}, from step {options.start_powerSGD_iter} on"
    ]
    if counts["steps"] == 0:
        return "\n  ".join([*lines, f"step {states.step}: nothing has been reduced yet"])
    before, after = counts["bytes_before"], counts["bytes_after"]
    whole, packed = counts["compressed_bytes_before"], counts["compressed_bytes_after"]
    fewer = f"{ratio(before, after):.1f} x fewer"
    if packed and (packed, whole) != (after, before):
        fewer += f", {ratio(whole, packed):.1f} x where compressed"
    skipped = f", {counts['skipped_steps']} skipped" if counts["skipped_steps"] else ""
    following = "compressed" if attachment.compressing else "exact"
    lines += [
        f"step {states.step}{skipped}: the next one is {following}",
        f"sent {size_text(after)} instead of {size_text(before)} ({fewer})",
    ]
    if states.loss_scale.device.type == "cpu" and sparse is None:
        lines += _benefit(counts, group.size())
    return "\n  ".join(lines)


def _benefit(counts: dict[str, Any], size: int) -> list[str]:
    """Says below which bandwidth compression is faster than plain averaging.

    Below it, sending the bytes saved would take longer than the stages do. A ring all-reduce sends
    2 (W - 1) / W times those bytes. Overlap and latency are ignored. The host doesn't know how long
    a GPU's stages take, because it only enqueues them.
    """
    seconds = sum(counts["seconds"][stage] for stage in _COMPUTED)
    saved = counts["compressed_bytes_before"] - counts["compressed_bytes_after"]
    if seconds <= 0 or saved <= 0 or size == 1:
        return []
    gigabits = 8e-9 * saved * 2 * (size - 1) / size / seconds
    return [f"judging by its stage times, it pays on links slower than about {gigabits:.1f} Gbit/s"]


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
