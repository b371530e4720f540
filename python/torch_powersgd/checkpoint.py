# SPDX-License-Identifier: BSD-3-Clause
"""The state of a compression, which ``Compression.state_dict`` documents."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from torch_powersgd import schema
from torch_powersgd._core import _C
from torch_powersgd.option_values import must_be, require, shown
from torch_powersgd.options import from_core, to_plain
from torch_powersgd.schema import Exactly, Schema
from torch_powersgd.sparse import Sparse

_RESIDUAL = ("residual",)  # the fields of a parameter with ``Sparse``
_PARTS = ("shard ", "process ")  # prefixes of the keys of parts
_HEADER: dict[str, Schema] = {
    "version": schema.equal_to(schema.VERSION),
    "step": schema.count,
    "grad_scale": schema.units,
    "per_rank": schema.truth,
}


def _fields(per_rank: bool, grad_scale: float = 1.0) -> dict[str, Schema]:
    """Returns the schema of a parameter's entry, with residuals in units of ``grad_scale``."""
    residual, factor = schema.tensor(grad_scale), schema.tensor()
    if not per_rank:
        return {"residual": residual, "q": _check_mean_q}
    return {
        "grad_scale": schema.units,
        "memory": lambda place, value: None if value is None else residual(place, value),
        "p_hat": factor,
        "q_local": residual,
        "q_warm": factor,
    }


def _check_mean_q(place: str, value: Any) -> None:
    schema.check(place, value, schema.tensor())
    fits = value.dim() == 0 or 1 <= value.shape[0] <= _C.max_rank
    require(fits, schema.named(place), f"a matrix of 1 to {_C.max_rank} rows", value)


def of_states(
    states: _C.ModelStates, per_rank: bool, sparse: Sparse | None = None
) -> dict[str, Any]:
    """Returns the state of a checkpoint. Collective without ``per_rank``."""
    fields: Collection[str] = _RESIDUAL if sparse is not None else _fields(per_rank)
    parameters: dict[str, dict[str, Any]]
    if sparse is not None:
        residuals = sparse.export(per_rank)
        parameters = {states.names[i]: {"residual": of} for i, of in residuals.items()}
    else:
        exports: Sequence[Any] = states.export_local() if per_rank else states.export_state()
        parameters = {
            of.name: {field: getattr(of, field) for field in fields}
            for of in exports
            if per_rank or of.residual is not None
        }
    for name, entry in parameters.items():
        entry[schema.CHECKSUM] = schema.sum_of(name, entry, fields)
    state: dict[str, Any] = {
        "version": schema.VERSION,
        "options": to_plain(from_core(states.options)),
        "step": states.step,
        "grad_scale": states.grad_scale,
        "per_rank": per_rank,
        "parameters": parameters,
    }
    state[schema.CHECKSUM] = schema.sum_of("", state, _HEADER)
    return state


@dataclass(frozen=True)
class Loaded:
    """A saved state that fits.

    Attributes:
        step: Number of steps before it was saved.
        grad_scale: Units of the residuals in a state without ``per_rank``.
        per_rank: Whether it is one process's own.
        entries: Its entries, in the core's form.
        residuals: Those of ``Sparse``, by the parameter's index.
        same: What must be equal on all processes, in JSON types.
    """

    step: int
    grad_scale: float
    per_rank: bool
    entries: list[Any]
    residuals: dict[int, torch.Tensor]
    same: dict[str, Any]

    def into(self, states: _C.ModelStates, sparse: Sparse | None = None) -> None:
        """Loads the state."""
        if self.per_rank:
            states.load_local(self.entries, self.step)
        else:
            states.load_state(self.entries, self.step, self.grad_scale)
        if sparse is not None:
            sparse.load(self.residuals)


def read(
    states: _C.ModelStates,
    state: Any,
    keys: dict[bool, str],
    place: str = "",
    sparse: Sparse | None = None,
) -> Loaded:
    """Checks a saved state, which may hold anything, and returns it.

    Args:
        states: States that it must fit.
        state: Argument of ``load_state_dict``.
        keys: Key of this process's state, with ``per_rank`` and without. It may be empty.
        place: Place of the state in a larger one, for messages.
        sparse: What holds the residuals, if not the states.

    Raises:
        ValueError: If it does not fit.
    """
    own = _own_part(state, keys, place)
    schema.check(place, own, {**_HEADER, "parameters": schema.by_name})
    sums, entries = [schema.verify(place, "", own, _HEADER)], []
    per_rank, scale = own["per_rank"], float(own["grad_scale"])
    parameters = own["parameters"]
    residuals: dict[int, torch.Tensor] = {}
    if sparse is not None:
        held = {states.names[i]: of for i, of in sparse.held().items()}
        wanted = {name: {"residual": schema.like(of)} for name, of in held.items()}
        schema.check(schema.entry(place, "parameters"), parameters, Exactly(wanted))
        residuals = {i: parameters[states.names[i]]["residual"] for i in sparse.held()}
    for name, entry in sorted(parameters.items()):
        at = schema.entry(schema.entry(place, "parameters"), name)
        if sparse is not None:
            sums.append(schema.verify(at, name, entry, _RESIDUAL))
            continue
        if per_rank:
            schema.check(at, entry, {"grad_scale": schema.units})
        fields = _fields(per_rank, float(entry["grad_scale"]) if per_rank else scale)
        schema.check(at, entry, fields)
        sums.append(schema.verify(at, name, entry, fields))
        entries.append(_in_core(name, entry, per_rank))
    (states.check_local if per_rank else states.check_state)(entries)
    same = {"step": own["step"], "per_rank": per_rank}
    if not per_rank:
        same["checksum of the state without per_rank"] = schema.checksum(sums)
    return Loaded(own["step"], scale, per_rank, entries, residuals, same)


def _own_part(state: Any, keys: dict[bool, str], place: str) -> Any:
    """Returns this process's part of the argument of ``load_state_dict``."""
    if state is None:
        wanted = "a dict. To start from a checkpoint without compression, leave load_state_dict out"
        raise must_be(schema.named(place), wanted, None)
    own = [key for key in keys.values() if key]
    if not own or not isinstance(state, dict):
        return state
    for key in own:
        if key in state:
            return state[key]
    has_parts = any(str(key).startswith(_PARTS) for key in state)
    if has_parts or (keys[False] and "version" in state):
        raise ValueError(
            f"{schema.named(place)} must have the part {' or '.join(map(repr, own))}, got "
            f"{shown(sorted(map(str, state)))}. Saved without per_rank, it can be loaded by any "
            "number of processes that hold the same shards"
        )
    return state


def _in_core(name: str, entry: dict[str, Any], per_rank: bool) -> Any:
    """Returns the core's form of a parameter's entry, without autograd history."""
    export: Any = _C.LocalExport() if per_rank else _C.ParameterExport()
    export.name = name
    for field in _fields(per_rank):
        value = entry[field]
        if value is not None:
            is_number = field == "grad_scale"
            setattr(export, field, float(value) if is_number else value.detach())
    return export


class PerRank(Stateful):
    """A view whose ``state_dict`` has ``per_rank``."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.whole.state_dict(per_rank=True)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.whole.load_state_dict(state_dict)
