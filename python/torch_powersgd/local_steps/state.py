# SPDX-License-Identifier: BSD-3-Clause
"""The state of local steps, which ``LocalSGD.state_dict`` documents."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd import checksum
from torch_powersgd.checkpoint import Loaded
from torch_powersgd.checkpoint_checks import LARGEST_STEP, is_dense, is_in_memory
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
        fragment.discard()  # Its mean would move parameters that may have been loaded already.
        compression.into(fragment.attachment.reducer.states)
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
        value = state.get(field)
        _require(type(value) is type(wanted) and value == wanted, field, repr(wanted), value)
    for field in ("step", "rounds"):
        value = state.get(field)
        fits = type(value) is int and 0 <= value <= LARGEST_STEP
        _require(fits, field, "an integer from 0 to 2**62", value)
    _check_outer(now.outer_optimizer, state.get("outer_optimizer"))
    saved = state.get("fragments")
    names = [str(i) for i in range(len(fragments))]
    fits = isinstance(saved, dict) and list(saved) == names
    _require(fits, "fragments", f"a dict of {len(names)} entries", saved)
    loaded = []
    for fragment, (name, part) in zip(fragments, saved.items(), strict=True):
        fits = isinstance(part, dict) and {"anchors", "compression"} <= part.keys()
        _require(fits, f"fragment {name}", "a dict of anchors and compression", part)
        _check_form("anchors", fragment.anchors, part["anchors"])
        loaded.append(fragment.attachment.read(part["compression"]))
    kinds = {compression.mean is None for compression in loaded}
    _require(len(kinds) == 1, "per_rank", "the same in all fragments", kinds)
    return loaded


def _check_outer(now: dict[str, Any] | None, saved: Any) -> None:
    field = "outer_optimizer"
    if now is None:
        _require(saved is None, field, "None", saved)
        return
    fits = isinstance(saved, dict) and {"param_groups", "state", "moved"} <= saved.keys()
    _require(fits, field, "that of the same kind of optimizer and parameters", saved)
    _check_form(f"{field}['state']", now["state"], saved["state"])
    moved = saved["moved"]
    fits = isinstance(moved, list) and all(type(i) is int and i in now["state"] for i in moved)
    _require(fits, f"{field}['moved']", "a list of the numbers of parameters", moved)
    groups, count = saved["param_groups"], len(now["param_groups"])
    fits = isinstance(groups, list) and len(groups) == count
    _require(fits, f"{field}['param_groups']", f"a list of {count} dicts", groups)
    for i, (group, found) in enumerate(zip(now["param_groups"], groups, strict=True)):
        place = f"{field}['param_groups'][{i}]"
        _require(isinstance(found, dict) and "params" in found, place, "a dict with params", found)
        shared = [key for key in group if key in found]  # A scheduler adds keys.
        _check_form(place, {k: group[k] for k in shared}, {k: found[k] for k in shared})


def _check_form(place: str, now: Any, saved: Any) -> None:
    """Raises a ValueError unless a saved value is finite, and of the present one's form."""
    if isinstance(now, dict):
        fits = isinstance(saved, dict) and saved.keys() == now.keys()
        _require(fits, place, f"a dict of {shown([*now])}", saved)
        for key, value in now.items():
            _check_form(f"{place}[{key!r}]", value, saved[key])
    elif isinstance(now, (list, tuple)):
        fits = isinstance(saved, (list, tuple)) and len(saved) == len(now)
        _require(fits, place, f"a list of {len(now)} items", saved)
        for i, (value, found) in enumerate(zip(now, saved, strict=True)):
            _check_form(f"{place}[{i}]", value, found)
    elif isinstance(now, torch.Tensor):
        wanted = f"a finite dense tensor, {now.dtype} {list(now.shape)}"
        _require(_is_like(now, saved), place, wanted, saved)
    elif isinstance(now, (int, float)) and not isinstance(now, bool):
        fits = type(saved) in (int, float) and abs(saved) <= sys.float_info.max
        _require(fits, place, "a finite number", saved)
    elif now is not None:
        _require(type(saved) is type(now), place, f"of type {type(now).__name__}", saved)


def _is_like(now: torch.Tensor, saved: Any) -> bool:
    if not is_dense(saved, type(now)) or (saved.shape, saved.dtype) != (now.shape, now.dtype):
        return False
    part = shard_of(saved.detach())
    return is_in_memory(part) and bool(part.isfinite().all())


def _content(state: dict[str, Any]) -> int:
    """Returns a checksum of what must be equal on all processes, which has been checked."""
    outer = state.get("outer_optimizer") or {"state": {}, "param_groups": []}
    groups = [
        {key: value for key, value in group.items() if not isinstance(value, torch.Tensor)}
        for group in outer["param_groups"]
    ]
    total = zlib.crc32(repr(groups).encode())
    anchors = [part["anchors"] for part in state["fragments"].values()]
    for entry in (*anchors, *outer["state"].values()):
        for name, value in entry.items():
            total = zlib.crc32(name.encode(), total)
            if isinstance(value, torch.Tensor):
                total = checksum.of_tensor(shard_of(value), total)
    return total


def _require(fits: bool, field: str, wanted: str, got: object) -> None:
    if not fits:
        raise ValueError(f"{field} of the state of local steps must be {wanted}, got {shown(got)}")
