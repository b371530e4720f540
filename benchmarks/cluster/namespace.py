# SPDX-License-Identifier: BSD-3-Clause
"""The network namespace of a process that hosts.Hosts did not start itself."""

from __future__ import annotations

import ctypes


def enter(namespace: str) -> None:
    """Moves this process to the network namespace. It must have a single thread."""
    new_network = 0x40000000  # CLONE_NEWNET
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as handle:
        if libc.setns(handle.fileno(), new_network):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
