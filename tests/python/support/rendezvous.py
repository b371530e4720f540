# SPDX-License-Identifier: BSD-3-Clause
"""What torchrun tells the processes that it starts, for ranks that ``support.ranks`` starts."""

from __future__ import annotations

import os
import socket


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def enter(rank: int, world_size: int, port: int) -> None:
    """Sets torchrun's variables in this process: init_process_group() then finds the others."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in (numbers | local).items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
