# SPDX-License-Identifier: BSD-3-Clause
"""The state of local steps, which ``LocalSGD.state_dict`` documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torch_powersgd.group_backends import find_backends
from torch_powersgd.option_values import shown
from torch_powersgd.store_agreement import equality_of, error_as_arguments, next_call
from torch_powersgd.targets import shard_of

if TYPE_CHECKING:
    from torch_powersgd.local_steps.steps import LocalSGD

VERSION = 1


def of(steps: LocalSGD, per_rank: bool) -> dict[str, Any]:
    """Returns the state. Collective without ``per_rank``."""
    found: dict[str, Any] = {
        "version": VERSION,
        "kind": type(steps).__name__,
        "step": steps._step,
        "rounds": steps._rounds,
        "fragments": {},
    }
    for i, fragment in enumerate(steps._fragments):
        found["fragments"][str(i)] = {
            "anchors": dict(fragment.anchors),
            "compression": fragment.compression.state_dict(per_rank),
        }
    outer = steps._outer_state()
    if outer is not None:
        found["outer_optimizer"] = outer
    return found


def load(steps: LocalSGD, state: Any) -> None:
    """Makes a saved state, which may hold anything, that of the steps. Collective."""
    mine: dict[str, Any]
    per_rank = False
    try:
        per_rank = _check(steps, state)
        mine = {"step": state["step"], "rounds": state["rounds"], "per_rank": per_rank}
    except Exception as invalid:  # The other processes wait for this error, of any type.
        mine = error_as_arguments(invalid)
    function = f"{type(steps).__name__}.load_state_dict"
    timeout = find_backends(steps.group)[0].options._timeout
    same = equality_of(f"the states of {function}")
    next_call(steps.group, function, timeout).agree(mine, same)
    for fragment, saved in zip(steps._fragments, state["fragments"].values(), strict=True):
        fragment.compression.load_state_dict(saved["compression"])
        with torch.no_grad():
            for name, anchor in fragment.anchors.items():
                anchor.copy_(saved["anchors"][name])
        if not per_rank:
            fragment.reset()
    if "outer_optimizer" in state:
        steps._load_outer_state(state["outer_optimizer"])
    steps._step, steps._rounds = state["step"], state["rounds"]


def _check(steps: LocalSGD, state: Any) -> bool:
    """Returns whether a state is one of ``per_rank``. It raises a ValueError if it does not fit."""
    if not isinstance(state, dict):
        raise ValueError(f"the state must be a dict, got {type(state).__name__}")
    for field, wanted in (("version", VERSION), ("kind", type(steps).__name__)):
        if state.get(field) != wanted:
            raise ValueError(
                f"{field} of the state must be {wanted!r}, got {shown(state.get(field))}"
            )
    for field in ("step", "rounds"):
        value = state.get(field)
        if type(value) is not int or value < 0:
            raise ValueError(f"{field} of the state must be an integer >= 0, got {shown(value)}")
    saved = state.get("fragments")
    if not isinstance(saved, dict) or list(saved) != [str(i) for i in range(len(steps._fragments))]:
        raise ValueError(
            f"fragments of the state must be {len(steps._fragments)}, as of this {state['kind']}, "
            f"got {shown(saved)}"
        )
    kinds = set()
    for fragment, part in zip(steps._fragments, saved.values(), strict=True):
        _check_anchors(fragment.anchors, part["anchors"])
        kinds.add(fragment.compression._read(part["compression"]).mean is None)
    if len(kinds) != 1:
        raise ValueError("the fragments of the state must all be of per_rank, or none")
    return kinds.pop()


def _check_anchors(anchors: dict[str, torch.Tensor], saved: Any) -> None:
    if not isinstance(saved, dict) or saved.keys() != anchors.keys():
        raise ValueError("the anchors of the state must be those of the model's parameters")
    for name, anchor in anchors.items():
        found = saved[name]
        if (
            not isinstance(found, torch.Tensor)
            or found.shape != anchor.shape
            or found.dtype != anchor.dtype
            or not shard_of(found).isfinite().all()
        ):
            raise ValueError(
                f"the anchor of {name!r} must be finite, {anchor.dtype} {list(anchor.shape)}, got "
                f"{shown(found)}"
            )
