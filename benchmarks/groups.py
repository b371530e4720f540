# SPDX-License-Identifier: BSD-3-Clause
"""The process group of a benchmark, which works with torch's PowerSGD hook too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

# Keeps the groups until the process exits. Otherwise a callback of torch's hook may hold the last
# reference to one: Gloo's own thread then destroys it, and aborts on joining itself.
_groups: list[dist.ProcessGroup | None] = []


@contextmanager
def default_group(backend: str, **arguments: Any) -> Iterator[None]:
    """A context with a default group, which init_process_group makes with these arguments.

    After an exception the group is not destroyed, because that could hang.
    """
    dist.init_process_group(backend, **arguments)
    _groups.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()
