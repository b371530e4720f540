# SPDX-License-Identifier: BSD-3-Clause
"""Damages a saved state: any value in any place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


class Subclass(torch.Tensor):
    """A tensor of another class."""


class Unprintable:
    """A value that cannot even be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("this value has no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("this value compares with nothing")

    __hash__ = None  # type: ignore[assignment]


Outcome = tuple[str, str]  # the type and the message of an error, both empty without one


def outcome_of(call: Callable[[], Any]) -> Outcome:
    """The error that a call raises. The test fails if it names C++ types instead of the cause."""
    try:
        call()
    except Exception as error:
        found = type(error).__name__, str(error)
    else:
        return "", ""
    assert "incompatible function arguments" not in found[1], found
    return found


def _like(value: Any) -> torch.Tensor:
    """The replaced tensor, or a substitute if the value is not a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else torch.ones(3, 4)


# Values that replace the original.
VALUES: dict[str, Callable[[Any], Any]] = {
    "none": lambda value: None,
    "minus one": lambda value: -1,
    "zero": lambda value: 0,
    "a fraction": lambda value: 1.5,
    "one more": lambda value: value + 1 if isinstance(value, (int, float, torch.Tensor)) else 1,
    "70 bits": lambda value: 2**70,
    "63 bits": lambda value: 2**63 - 1,
    "5000 digits": lambda value: 10**5000,
    "not a number": lambda value: math.nan,
    "infinite": lambda value: math.inf,
    "denormal": lambda value: 5e-324,
    "true": lambda value: True,
    "text": lambda value: "text",
    "surrogate": lambda value: "\ud800",
    "bytes": lambda value: b"3",
    "list": lambda value: [value],
    "empty dict": lambda value: {},
    "empty list": lambda value: [],
    "unprintable": lambda value: Unprintable(),
    "nested": lambda value: {"a": {"b": [value]}},
    "scalar tensor": lambda value: torch.tensor(3),
    "two numbers": lambda value: torch.tensor([1, 2]),
    "NaN inside": lambda value: _with(_like(value), math.nan),
    "infinity inside": lambda value: _with(_like(value), math.inf),
    "NaN everywhere": lambda value: _like(value) * math.nan,
    "huge numbers": lambda value: _like(value).double() * 1e300,
    "large numbers": lambda value: _like(value).double() * 1e30,
    "float64": lambda value: _like(value).double(),
    "float16": lambda value: _like(value).half(),
    "float8": lambda value: _like(value).to(torch.float8_e5m2),
    "integers": lambda value: _like(value).int(),
    "truth values": lambda value: _like(value).bool(),
    "complex": lambda value: _like(value).to(torch.complex64),
    "sparse": lambda value: _like(value).to_sparse(),
    "meta": lambda value: _like(value).to("meta"),
    "claims 2**50 rows": lambda value: _claims(_like(value), 2**50),
    "claims the shape": lambda value: torch.ones(()).expand(_like(value).shape),
    "needs grad": lambda value: _like(value).requires_grad_(),
    "parameter": lambda value: torch.nn.Parameter(_like(value)),
    "subclass": lambda value: _like(value).as_subclass(Subclass),
    "no rows": lambda value: _like(value)[:0],
    "one row less": lambda value: _like(value)[:-1],
    "one row more": lambda value: torch.cat([_like(value), _like(value)[:1]]),
    "flat": lambda value: _like(value).flatten(),
    "transposed": lambda value: _like(value).transpose(0, -1),
    "other strides": lambda value: _like(value).transpose(0, -1).contiguous().transpose(0, -1),
    "0-d": lambda value: torch.tensor(1.0),
    "storage freed": lambda value: _freed(_like(value)),
}


def _with(tensor: torch.Tensor, number: float) -> torch.Tensor:
    if tensor.numel():
        tensor.view(-1)[-1] = number
    return tensor


def _claims(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.ones((), dtype=tensor.dtype).expand(rows, *tensor.shape[1:])


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@dataclass(frozen=True)
class Damage:
    """A change to a state.

    Attributes:
        place: The keys that lead to the value in a process's part of the state. A number is the
            position of a key in its dictionary.
        value: A key of ``VALUES``, "gone" or "renamed".
        only: The only rank with the damage, or None for all.
    """

    place: tuple[str | int, ...]
    value: str
    only: int | None = None

    def apply(self, state: dict[str, Any], rank: int) -> Any:
        """Changes the state. Returns it, or its replacement."""
        if self.only is not None and rank != self.only:
            return state
        keys = [*self.place] if "version" in state else [0, *self.place]
        if not keys:
            return VALUES[self.value](state)
        holder: Any = state
        for key in keys[:-1]:
            holder = holder[_key(holder, key)]
        last = _key(holder, keys[-1])
        if self.value == "gone":
            holder.pop(last, None)
        elif self.value == "renamed":
            holder[5] = holder.pop(last, None)
        else:
            holder[last] = VALUES[self.value](holder.get(last))
        return state


def places(state: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each kind of entry that is loaded, but not into a state within it."""
    yield here
    if isinstance(state, dict) and not (here and "version" in state):
        entries = [*state.values()]
        alike = all(isinstance(e, dict) and e.keys() == entries[0].keys() for e in entries)
        for key in [key for key in state if key != "options"][-1 if alike else 0 :]:
            yield from places(state[key], (*here, key))


def _key(holder: Any, key: str | int) -> Any:
    if isinstance(holder, list) or not isinstance(key, int):
        return key
    return list(holder)[key % len(holder)]
