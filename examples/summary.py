# SPDX-License-Identifier: BSD-3-Clause
"""The last line that the examples with other libraries' training loops print."""

import torch.distributed as dist

import torch_powersgd


def summary(loss: float) -> str:
    return f"loss {loss:.3f}; {sent()}"


def sent(group: dist.ProcessGroup | None = None) -> str:
    stats = torch_powersgd.stats(group)
    return (
        f"{stats['exact_calls']} buckets sent exactly, "
        f"{stats['compressed_calls']} compressed, {stats['ratio']:.1f} times fewer bytes in all"
    )
