# SPDX-License-Identifier: BSD-3-Clause
"""The process group of a benchmark, which works with torch's PowerSGD hook too, and its store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
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


def tcp_store(
    folder: Path, rank: int, address: str = "127.0.0.1", seconds: float = 300
) -> dist.TCPStore:
    """A store that rank 0 serves on a free port, which it writes to a file in the folder."""
    file = folder / "port"
    while rank and not file.exists():
        time.sleep(0.01)
    port = int(file.read_text()) if rank else 0  # 0: a free one
    store = dist.TCPStore(
        address,
        port,
        is_master=rank == 0,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )
    if rank == 0:
        part = folder / "port.part"
        part.write_text(str(store.port))
        part.replace(file)
    return store
