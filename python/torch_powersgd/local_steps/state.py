# SPDX-License-Identifier: BSD-3-Clause
"""The state of local steps, which ``LocalSGD.state_dict`` documents."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd import checksum
from torch_powersgd.checkpoint import Loaded
from torch_powersgd.group_backends import next_call_on
from torch_powersgd.local_steps.fragment import Fragment
from torch_powersgd.option_values import shown
from torch_powersgd.store_agreement import equality_of, error_as_arguments
from torch_powersgd.targets import shard_of

VERSION = 1


@dataclass(frozen=True)
class Progress:
    """The part of a state that doesn't belong to the fragments.

    Attributes:
        kind: Name of the class.
        step, rounds: Numbers of steps and rounds taken.
        outer_optimizer: State of the outer optimizer, if there is one.
    """

    kind: str
    step: int
    rounds: int
    outer_optimizer: dict[str, Any] | None


def of(progress: Progress, fragments: Sequence[Fragment], per_rank: bool) -> dict[str, Any]:
    """Returns the state. Collective without ``per_rank``."""
    parts = {
        str(i): {
            "anchors": {name: anchor.clone() for name, anchor in fragment.anchors.items()},
            "compression": fragment.compression.state_dict(per_rank),
        }
        for i, fragment in enumerate(fragments)
    }
    return {"version": VERSION, **vars(progress), "fragments": parts}


def load(
    now: Progress, group: dist.ProcessGroup, fragments: Sequence[Fragment], state: Any
) -> Progress:
    """Loads a saved state, which may hold anything, into the fragments. Collective.

    Returns:
        What takes the place of the present progress.
    """
    loaded: list[Loaded] = []
    try:
        loaded = _check(now, fragments, state)
        mine = {"step": state["step"], "rounds": state["rounds"], "checksum": _content(state)}
        mine["fragments"] = [compression.plain() for compression in loaded]
    except Exception as invalid:  # Of any type: the other processes wait for it.
        mine = error_as_arguments(invalid)
    function = f"{now.kind}.load_state_dict"
    next_call_on(group, function).agree(mine, equality_of(f"the states that {function} loads"))
    parts = zip(fragments, state["fragments"].values(), loaded, strict=True)
    for fragment, saved, compression in parts:
        compression.into(fragment.compression._reducer.states)
        with torch.no_grad():
            for name, anchor in fragment.anchors.items():
                anchor.copy_(saved["anchors"][name])
        if compression.mean is not None:
            fragment.reset()
    return Progress(**{field.name: state.get(field.name) for field in fields(Progress)})


def _check(now: Progress, fragments: Sequence[Fragment], state: Any) -> list[Loaded]:
    """Returns the compressions of a state, checked. It raises a ValueError if one doesn't fit."""
    _require(isinstance(state, dict), "type", "a dict", type(state).__name__)
    if "kind" not in state:
        raise ValueError(
            f"the state must be what {now.kind}.state_dict() returned, got one with the keys "
            f"{shown(sorted(map(str, state))[:5])}"
        )
    for field, wanted in (("version", VERSION), ("kind", now.kind)):
        _require(state.get(field) == wanted, field, repr(wanted), state.get(field))
    for field in ("step", "rounds"):
        value = state.get(field)
        _require(type(value) is int and value >= 0, field, "an integer >= 0", value)
    outer = _outline(state.get("outer_optimizer"))
    fits = outer == _outline(now.outer_optimizer)
    _require(fits, "outer_optimizer", "that of the same kind of optimizer and parameters", outer)
    saved = state.get("fragments")
    names = [str(i) for i in range(len(fragments))]
    fits = isinstance(saved, dict) and list(saved) == names
    _require(fits, "fragments", f"a dict of {len(names)} entries", saved)
    loaded = []
    for fragment, part in zip(fragments, saved.values(), strict=True):
        _check_anchors(fragment.anchors, part["anchors"])
        loaded.append(fragment.compression._read(part["compression"]))
    kinds = {compression.mean is None for compression in loaded}
    _require(len(kinds) == 1, "per_rank", "the same in all fragments", kinds)
    return loaded


def _check_anchors(anchors: dict[str, torch.Tensor], saved: Any) -> None:
    fits = isinstance(saved, dict) and saved.keys() == anchors.keys()
    _require(fits, "anchors", "those of the model's parameters", saved)
    for name, anchor in anchors.items():
        found = saved[name]
        fits = (
            isinstance(found, torch.Tensor)
            and found.shape == anchor.shape
            and found.dtype == anchor.dtype
            and bool(shard_of(found).isfinite().all())
        )
        _require(fits, f"anchor {name!r}", f"finite, {anchor.dtype} {list(anchor.shape)}", found)


def _outline(outer: Any) -> Any:
    """Returns what two states of an outer optimizer must share, or None if it is no such state."""
    if not isinstance(outer, dict) or not {"param_groups", "state", "moved"} <= outer.keys():
        return None
    shapes = {
        number: {field: getattr(value, "shape", None) for field, value in entry.items()}
        for number, entry in outer["state"].items()
    }
    return [group["params"] for group in outer["param_groups"]], shapes


def _content(state: dict[str, Any]) -> int:
    """Returns a checksum of the tensors that must be equal on all processes."""
    parts = [part["anchors"] for part in state["fragments"].values()]
    total = 0
    for part in (*parts, *(state.get("outer_optimizer") or {"state": {}})["state"].values()):
        for name, value in part.items():
            total = zlib.crc32(name.encode(), total)
            if isinstance(value, torch.Tensor):
                total = checksum.of_tensor(shard_of(value), total)
    return total


def _require(fits: bool, field: str, wanted: str, got: object) -> None:
    if not fits:
        raise ValueError(f"{field} of the state of local steps must be {wanted}, got {shown(got)}")
