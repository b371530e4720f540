# SPDX-License-Identifier: BSD-3-Clause
"""The text of a compression: what is compressed, what was sent, and whether that helps."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torch_powersgd._core import _C
from torch_powersgd.option_values import dtype_name
from torch_powersgd.options import Options
from torch_powersgd.stats import ratio
from torch_powersgd.units import size_text

_COMPUTED = ("project", "orthogonalize", "back_project", "reconstruct")


def summary(reducer: _C.BucketReducer, group: dist.ProcessGroup, options: Options) -> str:
    """Returns up to four lines."""
    states, counts = reducer.states, reducer.stats()
    outline = states.outline()
    wire = "float32" if options.wire_dtype is None else dtype_name(options.wire_dtype)
    if group.size() == 1 and not counts["bytes_before"]:
        return f"Compression over 1 process, which has nothing to send\n  step {states.step}"
    processes = "1 process" if group.size() == 1 else f"{group.size()} processes"
    lines = [
        f"Compression over {processes}: {outline.compressed_parameters} of "
        f"{outline.parameters} parameters at matrix rank {options.matrix_approximation_rank} in "
        f"{wire}, from step {options.start_powerSGD_iter} on"
    ]
    if counts["steps"] == 0:
        return "\n  ".join([*lines, f"step {states.step}: nothing has been reduced yet"])
    before, after = counts["bytes_before"], counts["bytes_after"]
    whole, packed = counts["compressed_bytes_before"], counts["compressed_bytes_after"]
    fewer = f"{ratio(before, after):.1f} x fewer"
    if packed and (packed, whole) != (after, before):
        fewer += f", {ratio(whole, packed):.1f} x where compressed"
    skipped = f", {counts['skipped_steps']} skipped" if counts["skipped_steps"] else ""
    following = "compressed" if reducer.compressing else "exact"
    lines += [
        f"step {states.step}{skipped}: the next one is {following}",
        f"sent {size_text(after)} instead of {size_text(before)} ({fewer})",
    ]
    if states.loss_scale.device.type == "cpu":
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
