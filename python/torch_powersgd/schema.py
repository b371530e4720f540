# SPDX-License-Identifier: BSD-3-Clause
"""What the entries of a saved state must be, and their checksums.

A saved state may hold anything. No check allocates a tensor of a size that the state claims.
"""

from __future__ import annotations

import ctypes
import math
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from torch_powersgd.matrices import as_reals
from torch_powersgd.option_values import is_unicode, must_be, positive, require, shown
from torch_powersgd.targets import shard_of

VERSION = 1  # of all states
CHECKSUM = "crc32"  # the key of a checksum
# Raises a ValueError unless the value at a place fits. A place is the keys that lead to the value.
Check = Callable[[str, Any], None]
# That of a dict or a list has a schema for each entry. A dict may have other entries as well.
Schema: TypeAlias = "Check | Mapping[Any, Schema] | Sequence[Schema]"

_LARGEST = torch.finfo(torch.float32).max
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Exactly(dict[Any, Schema]):
    """The schema of a dict that has no other entries."""


def check(place: str, value: Any, schema: Schema) -> None:
    """Raises a ValueError that names the first entry that does not fit."""
    if callable(schema):
        schema(place, value)
    elif isinstance(schema, Mapping):
        require(isinstance(value, dict), named(place), "a dict", type(value))
        missing = [key for key in schema if key not in value]
        if missing or (isinstance(schema, Exactly) and len(value) > len(schema)):
            wanted = f"with {missing[0]!r}" if missing else f"of {shown([*schema])} alone"
            raise ValueError(
                f"{named(place)} must be a dict {wanted}, as state_dict() returned it, got one "
                f"with the keys {shown(sorted(map(str, value)))}"
            )
        for key, inner in schema.items():
            check(entry(place, key), value[key], inner)
    else:
        fits = isinstance(value, (list, tuple)) and len(value) == len(schema)
        require(fits, named(place), f"a list of {len(schema)} items", value)
        for i, (item, inner) in enumerate(zip(value, schema, strict=True)):
            check(entry(place, i), item, inner)


def entry(place: str, key: object) -> str:
    """Returns the place of an entry of a dict or a list. That of the whole state is empty."""
    return f"{place}[{shown(key)}]" if place else str(key)


def named(place: str) -> str:
    """Returns the name of a place in messages."""
    return f"{place} of the checkpoint" if place else "the checkpoint"


def rule(wanted: str, fits: Callable[[Any], bool]) -> Check:
    """Returns a check whose message says what is wanted."""
    return lambda place, value: require(fits(value), named(place), wanted, value)


def equal_to(wanted: object) -> Check:
    return rule(repr(wanted), lambda value: type(value) is type(wanted) and value == wanted)


anything = rule("anything", lambda value: True)
truth = rule("True or False", lambda value: isinstance(value, bool))
count = rule("an integer from 0 to 2**62", lambda value: type(value) is int and 0 <= value <= 2**62)
_finite_number = rule(
    "a finite number",
    lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max,
)


def by_name(place: str, value: Any) -> None:
    """Checks a dict whose keys are names."""
    require(isinstance(value, dict), named(place), "a dict", type(value))
    for name in value:
        fits = isinstance(name, str) and is_unicode(name)
        require(fits, f"the keys of {named(place)}", "strings", name)


def units(place: str, value: Any) -> None:
    """Checks a grad_scale, by which the core divides in float32."""
    if 1 / positive(named(place), value) > _LARGEST:
        raise must_be(named(place), f"at least {1 / _LARGEST:.3g}", value)


def tensor(grad_scale: float = 1.0) -> Check:
    """Returns the check of a tensor that is finite in float32, also divided by its grad_scale."""
    divided = f" after division by its grad_scale, {grad_scale:g}" if grad_scale < 1 else ""

    def check_tensor(place: str, value: Any) -> None:
        fits = _is_dense(value) and value.dtype in _DTYPES
        require(fits, named(place), "a dense floating-point tensor", value)
        largest = _largest(place, value.detach())
        fits = largest <= _LARGEST * min(grad_scale, 1)
        require(fits, named(place), f"finite in float32{divided}", largest)

    return check_tensor


def like(present: Any) -> Schema:
    """Returns the schema of what may take the place of a value: finite, and of its form."""
    if isinstance(present, dict):
        return Exactly({key: like(value) for key, value in present.items()})
    if isinstance(present, (list, tuple)):
        return [like(value) for value in present]
    if isinstance(present, torch.Tensor):
        return _like_tensor(present)
    if isinstance(present, (int, float)) and not isinstance(present, bool):
        return _finite_number
    kind = type(present)
    wanted = f"of type {kind.__name__}"
    return anything if present is None else rule(wanted, lambda value: type(value) is kind)


def _like_tensor(present: torch.Tensor) -> Check:
    form = (present.dtype, present.shape)

    def check_tensor(place: str, value: Any) -> None:
        fits = _is_dense(value, type(present)) and (value.dtype, value.shape) == form
        require(fits, named(place), f"a dense tensor, {form[0]} {list(form[1])}", value)
        largest = _largest(place, shard_of(value.detach()))
        require(largest < math.inf, named(place), "finite", largest)

    return check_tensor


def _is_dense(value: Any, *others: type) -> bool:
    """Whether a value is a dense tensor of torch's own classes or of one of the others."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, *others)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not value.is_nested
    )


def _largest(place: str, value: torch.Tensor) -> float:
    """Returns the largest magnitude, or NaN if any element is NaN."""
    # An expanded tensor has no storage for its elements, and they may not fit into memory.
    stored = value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    require(stored, named(place), "a tensor with storage for all of its elements", value)
    value = as_reals(value)
    if value.numel() == 0 or not value.is_floating_point():
        return 0.0
    low, high = value.aminmax()
    return max(abs(low.item()), abs(high.item())) if low == low else math.nan


def sum_of(name: str, part: dict[str, Any], fields: Collection[str]) -> int:
    """Returns the checksum of some fields of a part of a state."""
    return checksum([name, {field: part[field] for field in fields}])


def verify(
    place: str, name: str, part: dict[str, Any], fields: Collection[str], key: str = CHECKSUM
) -> int:
    """Returns ``sum_of`` fields that have been checked: an expanded tensor may be too large.

    Raises:
        ValueError: If the part has another checksum under the key. An edited state may have none.
    """
    found = sum_of(name, part, fields)
    if key in part and (type(part[key]) is not int or part[key] != found):
        raise ValueError(
            f"{named(place)} does not match its crc32: the file is damaged, or the state was "
            f"edited after it was saved. To load an edited state, delete its {key!r}"
        )
    return found


def checksum(value: Any, total: int = 0) -> int:
    """Returns the checksum ``total``, continued over a value. ``torch.load`` verifies none."""
    if isinstance(value, torch.Tensor):
        flat = shard_of(value.detach()).cpu().contiguous()
        total = checksum(f"{flat.dtype} {list(flat.shape)}", total)
        if flat.nbytes:
            data = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
            total = zlib.crc32(data, total)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            total = checksum([str(key), value[key]], total)
    elif isinstance(value, (list, tuple)):
        for item in value:
            total = checksum(item, total)
    else:
        text = repr(value) if isinstance(value, str) else shown(value)  # a name is not cut
        total = zlib.crc32(text.encode(), total)
    return total
