# SPDX-License-Identifier: BSD-3-Clause
"""Checks of a saved state, which may hold anything, before any of it is used.

No check allocates a tensor of a size that the state claims. All messages name the entry.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_powersgd._core import _C
from torch_powersgd.option_values import is_unicode, positive, shown

VERSION = 1
_PARTS = ("shard ", "process ")  # prefixes of the keys of parts
LOCAL_FIELDS = ("memory", "p_hat", "q_local", "q_warm", "grad_scale")
_IN_UNITS = ("residual", "memory", "q_local")  # multiplied by a grad_scale
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LARGEST_STEP = 2**62
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Saved:
    """The parts of a saved state that can be checked without a model.

    Attributes:
        step: Number of steps before it was saved.
        grad_scale: Units of its residuals.
        per_rank: Whether it is one process's own.
        parameters: Its entries by the name of the parameter.
    """

    step: int
    grad_scale: float
    per_rank: bool
    parameters: dict[str, Any]


def own_state(state: Any, keys: dict[bool, str]) -> dict[str, Any]:
    """Returns this process's part of the argument of ``load_state_dict``.

    Args:
        state: Argument of ``load_state_dict``.
        keys: Key of the part, with ``per_rank`` and without. Empty: a state has no parts.
    """
    if state is None:
        raise ValueError(
            "the checkpoint must be a dict, got None. To start from a checkpoint without "
            "compression, leave load_state_dict out"
        )
    if not isinstance(state, dict):
        raise ValueError(f"the checkpoint must be a dict, got {type(state).__name__}")
    wanted = [key for key in keys.values() if key]
    for key in wanted:
        if key in state:
            return _checked_form(state[key])
    has_parts = any(isinstance(key, str) and key.startswith(_PARTS) for key in state)
    if has_parts or (keys[False] and "version" in state):
        raise ValueError(
            f"the checkpoint must have the part {' or '.join(map(repr, wanted))}, got "
            f"{shown(sorted(map(str, state)))}. Saved without per_rank, it can be loaded by any "
            "number of processes that hold the same shards"
        )
    return _checked_form(state)


def read(state: dict[str, Any]) -> Saved:
    """Returns the parts of a state. It raises a ValueError if one of them is invalid."""
    step, parameters = state["step"], state["parameters"]
    whole = isinstance(step, int) and not isinstance(step, bool)
    if not whole or not 0 <= step <= LARGEST_STEP:
        raise ValueError(
            f"step of the checkpoint must be an integer from 0 to 2**62, got {shown(step)}"
        )
    scale = _units("grad_scale of the checkpoint", state["grad_scale"])
    if not isinstance(parameters, dict):
        raise ValueError(
            f"parameters of the checkpoint must be a dict, got {type(parameters).__name__}"
        )
    for name in parameters:
        if not isinstance(name, str) or not is_unicode(name):
            raise ValueError(
                f"parameter names in the checkpoint must be strings, got {shown(name)}"
            )
    if not isinstance(state["per_rank"], bool):
        raise ValueError(
            f"per_rank of the checkpoint must be True or False, got {shown(state['per_rank'])}"
        )
    return Saved(step, scale, state["per_rank"], parameters)


def to_mean(name: str, entry: Any, saved: Saved) -> _C.ParameterExport:
    """Returns the core's form of an entry of a mean state."""
    fields = ("residual", "q")
    _check_entry(name, entry, fields)
    tensors = _tensors(name, entry, fields, saved.grad_scale)
    q = tensors["q"]
    parameter = _C.ParameterExport()
    parameter.name, parameter.residual, parameter.q = name, tensors["residual"], q
    if q.dim() > 0 and not 1 <= q.shape[0] <= _C.max_rank:
        raise ValueError(
            f"q of the checkpoint's {shown(name)} must have 1 to {_C.max_rank} rows, got "
            f"{q.shape[0]}"
        )
    return parameter


def to_local(name: str, entry: Any) -> _C.LocalExport:
    """Returns the core's form of an entry of a rank's own state."""
    _check_entry(name, entry, LOCAL_FIELDS)
    scale = _units(f"grad_scale of the checkpoint's {shown(name)}", entry["grad_scale"])
    fields = [field for field in LOCAL_FIELDS if field != "grad_scale"]
    if entry["memory"] is None:  # without error feedback
        fields.remove("memory")
    tensors = _tensors(name, entry, fields, scale)
    local = _C.LocalExport()
    local.name, local.grad_scale = name, scale
    for field, tensor in tensors.items():
        setattr(local, field, tensor)
    return local


def _checked_form(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict):
        raise ValueError(f"the checkpoint must be a dict, got {type(state).__name__}")
    if "version" not in state:
        raise ValueError(
            "the checkpoint must be what Compression.state_dict() returned, but it has no version; "
            f"its keys are {shown(sorted(map(str, state))[:5])}. Is it the state of the model?"
        )
    version = state["version"]
    if type(version) is not int or version != VERSION:
        raise ValueError(f"version of the checkpoint must be {VERSION}, got {shown(version)}")
    missing = {"step", "grad_scale", "per_rank", "parameters"} - state.keys()
    if missing:
        raise ValueError(f"the checkpoint has no {', '.join(sorted(missing))}")
    return state


def _check_entry(name: str, entry: Any, fields: Sequence[str]) -> None:
    """Raises a ValueError unless a parameter's entry has the fields."""
    if not isinstance(entry, dict):
        raise ValueError(
            f"the checkpoint's {shown(name)} must be a dict, got {type(entry).__name__}"
        )
    if not set(fields) <= entry.keys():
        raise ValueError(f"the checkpoint's {shown(name)} must have {', '.join(sorted(fields))}")


def _tensors(
    name: str, entry: dict[str, Any], fields: Sequence[str], grad_scale: float
) -> dict[str, torch.Tensor]:
    """Returns the tensors of an entry by field, checked and without their autograd history."""
    found: dict[str, torch.Tensor] = {}
    for field in fields:
        value = entry[field]
        scale = grad_scale if field in _IN_UNITS else 1.0
        _check_tensor(f"{field} of the checkpoint's {shown(name)}", value, scale)
        found[field] = value.detach()
    return found


def _check_tensor(place: str, value: Any, grad_scale: float) -> None:
    """Raises a ValueError unless the value is a tensor whose elements are in memory and finite.

    The core holds them divided by ``grad_scale``, in float32.
    """
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{place} must be a tensor, got {type(value).__name__}")
    if not is_dense(value) or value.dtype not in _DTYPES:
        raise ValueError(
            f"{place} must be a dense floating-point tensor, got {_description(value)}"
        )
    if not is_in_memory(value):
        raise ValueError(
            f"{place} must be a tensor with storage for all of its elements, got "
            f"{_description(value)}"
        )
    largest = _largest(value)
    if not largest <= _LARGEST:
        raise ValueError(f"{place} must be finite in float32, got {largest:g}")
    if largest / grad_scale > _LARGEST:
        raise ValueError(
            f"{place} must be finite in float32 after division by its grad_scale, "
            f"{grad_scale:g}, got {largest:g}"
        )


def is_dense(value: Any, *others: type) -> bool:
    """Whether a value is a dense tensor of torch's own classes or of one of the others."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter, *others)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not value.is_nested
    )


def is_in_memory(value: torch.Tensor) -> bool:
    """Whether all elements are in memory. An expanded tensor's are not, and may not fit."""
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _description(value: torch.Tensor) -> str:
    kind = "" if type(value) is torch.Tensor else f"{type(value).__name__}, "
    shape = "nested" if value.is_nested else list(value.shape)
    return f"{kind}{value.dtype}, {value.layout}, {shape} on {value.device.type}"


def _largest(value: torch.Tensor) -> float:
    """Returns the largest magnitude, or NaN if any element is NaN."""
    if value.numel() == 0:
        return 0.0
    low, high = value.detach().aminmax()
    return max(abs(low.item()), abs(high.item())) if low == low else math.nan


def _units(place: str, value: Any) -> float:
    """Checks and returns a grad_scale, by which the core divides in float32."""
    scale = positive(place, value)
    if 1 / scale > _LARGEST:
        raise ValueError(f"{place} must be at least {1 / _LARGEST:.3g}, got {shown(value)}")
    return scale
