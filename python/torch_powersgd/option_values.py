# SPDX-License-Identifier: BSD-3-Clause
"""Checks of arguments, and the values of options from arguments and text."""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Mapping
from typing import Any

import torch

# The names of data types, and what Options holds for them. No torch dtype holds 4-bit integers.
_DTYPES: dict[str, torch.dtype | str] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": "int8",
    "int4": "int4",
}

# Maximum characters of a value in a message, and of a message, which may list all options.
_LONGEST_VALUE = 200
_LONGEST_MESSAGE = 700


def dtype_name(dtype: torch.dtype | str) -> str:
    """Returns the name of a data type as users write it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def cut(message: str, longest: int = _LONGEST_MESSAGE) -> str:
    """Returns a text, cut if it is too long for a message."""
    return message if len(message) <= longest else f"{message[:longest]}..."


def require(fits: bool, what: str, wanted: str, got: object) -> None:
    """Raises a ValueError unless a value fits: "<what> must be <wanted>, got <got>"."""
    if not fits:
        raise must_be(what, wanted, got)


def must_be(what: str, wanted: str, got: object) -> ValueError:
    """Returns the error of ``require``.

    Args:
        what: Name of the value.
        wanted: What is allowed.
        got: The value, or its type if that says enough.
    """
    return ValueError(f"{what} must be {wanted}, got {shown(got)}")


class _Shown(reprlib.Repr):
    """Shows values in messages: short, types by name, and tensors without their contents.

    Printing a tensor reads its memory. A tensor from a checkpoint may have none, or claim more
    elements than any memory holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = _LONGEST_VALUE

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, type):
            return x.__qualname__
        if isinstance(x, torch.Tensor):
            shape = "nested" if x.is_nested else list(x.shape)
            return f"<{type(x).__name__}: {x.dtype}, {x.layout}, {shape} on {x.device.type}>"
        return super().repr_instance(x, level)


_shown = _Shown()


def shown(value: object) -> str:
    """Returns a value as a message shows it, whatever it is."""
    try:
        return cut(_shown.repr(value), _LONGEST_VALUE)
    except Exception:  # Python itself refuses to print an integer of 5000 digits.
        return f"<{type(value).__name__}>"


def parse(variable: str, type_name: str, text: str) -> Any:
    """Returns a field's value from the text of its environment variable."""
    if type_name == "str":
        return text
    if "dtype" in type_name:
        return None if text.lower() == "none" else text.lower()
    if type_name.startswith("Mapping"):
        pairs = [part.strip().rpartition("=") for part in text.split(",")]
        fits = all(pattern and rank.isdecimal() for pattern, _, rank in pairs)
        require(fits, variable, "of the form PATTERN=RANK,PATTERN=RANK", text)
        return {pattern: int(rank) for pattern, _, rank in pairs}
    if type_name == "bool":
        truths = {"1": True, "true": True, "0": False, "false": False}
        require(text.lower() in truths, variable, f"one of {', '.join(truths)}", text)
        return truths[text.lower()]
    try:
        return int(text) if type_name == "int" else float(text)
    except ValueError:
        raise must_be(variable, f"of type {type_name}", text) from None


def typed(name: str, type_name: str, value: Any) -> Any:
    """Returns the value as exactly the field's type. A numpy scalar counts as a Python one."""
    if type_name.startswith("Mapping"):
        return _pairs(name, value)
    if type_name in ("int", "float"):
        number = _number(type_name, value)
        if number is not None:
            return number
    elif "dtype" in type_name and isinstance(value, torch.dtype):
        return _DTYPES.get(dtype_name(value), value)  # The core rejects unsupported types.
    elif isinstance(value, str) and "str" in type_name and is_unicode(value):
        return _DTYPES.get(dtype_name(value), value) if "dtype" in type_name else value
    elif (type_name == "bool" and isinstance(value, bool)) or (
        type_name.endswith("None") and value is None
    ):
        return value
    raise must_be(name, f"of type {type_name}", value)


def _pairs(name: str, value: Any) -> tuple[tuple[str, int], ...]:
    """Returns the items of a mapping from names to integers, or the items themselves."""
    error = must_be(name, "a mapping from names or patterns to integers", value)
    if not isinstance(value, Mapping | list | tuple):
        raise error
    items = value.items() if isinstance(value, Mapping) else value
    try:
        return tuple((typed(name, "str", key), typed(name, "int", of)) for key, of in items)
    except (TypeError, ValueError):  # an item is no pair, or not of a string and an integer
        raise error from None


def positive(name: str, value: Any) -> float:
    """Returns a Python number. It raises a ValueError unless the value is finite and > 0."""
    number = _number("float", value)
    if number is None or not (number > 0 and math.isfinite(number)):
        raise must_be(name, "a finite number > 0", value)
    return float(number)


def _number(type_name: str, value: Any) -> int | float | None:
    """Returns a Python number, or None if the value is not a number of this type."""
    if is_bool(value) or isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        return operator.index(value) if type_name == "int" else float(value)
    except Exception:  # An object's own conversion may raise anything.
        return None


def is_bool(value: Any) -> bool:
    """Returns whether a value is a boolean of Python, numpy or torch."""
    dtype = getattr(value, "dtype", None)
    return isinstance(value, bool) or dtype == torch.bool or str(dtype) == "bool"


def is_unicode(text: str) -> bool:
    """Returns whether a text can be encoded in UTF-8, as the core requires."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
