# SPDX-License-Identifier: BSD-3-Clause
"""Saved states, as bytes: torch passes tensors in shared memory, which is gone with its process."""

from __future__ import annotations

import io
from typing import Any

import torch


def to_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def own_part(state: dict[str, Any]) -> dict[str, Any]:
    """This process's part of a state. If there are several, each is under its own key."""
    return state if "version" in state else next(iter(state.values()))


def without_checksums(state: Any) -> Any:
    """The state without its checksums, which would reveal every change."""
    if not isinstance(state, dict):
        return state
    return {key: without_checksums(value) for key, value in state.items() if key != "crc32"}
