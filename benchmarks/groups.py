# SPDX-License-Identifier: BSD-3-Clause
"""Makes and destroys the group of a benchmark's rank, also where torch's PowerSGD hook runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

# The groups of this process, which exits with them. A callback of torch's hook may hold the last
# reference to one. Gloo's own thread would then destroy it, and abort on joining itself.
_groups: list[dist.ProcessGroup | None] = []


@contextmanager
def default_group(backend: str, **arguments: Any) -> Iterator[None]:
    """A block with a default group, which init_process_group makes with these arguments.

    After an exception the group is left to the exit of the process: to destroy it could hang.
    """
    dist.init_process_group(backend, **arguments)
    _groups.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()
