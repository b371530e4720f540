# SPDX-License-Identifier: BSD-3-Clause
"""Checksums of a checkpoint. ``torch.load`` doesn't verify those of its files."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch

from torch_powersgd.checkpoint_checks import LOCAL_FIELDS
from torch_powersgd.option_values import shown

KEY = "crc32"
_PARAMETERS = "parameters"
_LOADED = {"version", "step", "grad_scale", "per_rank", "residual", "q", *LOCAL_FIELDS}


def add(state: dict[str, Any]) -> None:
    """Adds a checksum to each parameter's entry, and one of everything else to the state."""
    for name, entry in state[_PARAMETERS].items():
        entry[KEY] = _of_entry(name, entry)
    state[KEY] = _of_rest(state)


def check(state: dict[str, Any]) -> int:
    """Verifies a state's checksums, if it has any: an edited state may have none.

    Check its tensors first, because an expanded one may be too large to read.

    Returns:
        The checksum of the whole state, which is the same on ranks with equal states.

    Raises:
        ValueError: If a checksum doesn't match.
    """
    found = [_of_rest(state)]
    _compare("the checkpoint", state, found[0])
    for name, entry in sorted(state[_PARAMETERS].items()):
        found.append(_of_entry(name, entry))
        _compare(f"the checkpoint's {name!r}", entry, found[-1])
    return zlib.crc32(repr(found).encode())


def _compare(what: str, part: dict[str, Any], found: int) -> None:
    if KEY in part and part[KEY] != found:
        raise ValueError(
            f"{what} does not match its crc32: the file is damaged, or the state was edited after "
            "it was saved. To load an edited state, delete that crc32"
        )


def _of_rest(state: dict[str, Any]) -> int:
    return _of_fields(state, 0)


def _of_entry(name: str, entry: dict[str, Any]) -> int:
    return _of_fields(entry, zlib.crc32(name.encode()))


def _of_fields(fields: dict[str, Any], total: int) -> int:
    """Returns the checksum ``total``, continued over all fields that are loaded."""
    for field in sorted(fields.keys() & _LOADED):
        value = fields[field]
        if isinstance(value, torch.Tensor):
            about = f"{field} {value.dtype} {list(value.shape)}"
            total = of_tensor(value, zlib.crc32(about.encode(), total))
        else:
            total = zlib.crc32(f"{field} {shown(value)}".encode(), total)
    return total


def of_tensor(tensor: torch.Tensor, total: int) -> int:
    """Returns the checksum ``total``, continued over the bytes of a tensor."""
    flat = tensor.detach().cpu().contiguous()
    if not flat.nbytes:
        return total
    return zlib.crc32((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()), total)
