# SPDX-License-Identifier: BSD-3-Clause
"""The state of local steps, which ``LocalSGD.state_dict`` documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd import schema
from torch_powersgd.agreement import agree, equality_of
from torch_powersgd.checkpoint import Loaded
from torch_powersgd.local_steps.fragment import Fragment
from torch_powersgd.option_values import require
from torch_powersgd.schema import Exactly, Schema

# The fields of a checksum. That of the outer optimizer leaves the hyperparameters out, because a
# scheduler adds some.
_NUMBERS = ("version", "kind", "step", "rounds")
_OUTER = ("state", "moved")
_ANCHORS = ("anchors", "kept")

# The part of a state besides the fragments: the ``kind`` of local steps, which is the name of the
# class, the numbers ``step`` and ``rounds``, and the state of the ``outer_optimizer`` or None.
Progress = dict[str, Any]


def of(progress: Progress, fragments: Sequence[Fragment], per_rank: bool) -> dict[str, Any]:
    """Returns the state. Collective without ``per_rank``."""
    key = _checksum_key(fragments)
    parts: dict[str, Any] = {
        str(i): {
            "anchors": {name: anchor.clone() for name, anchor in fragment.anchors.items()},
            "kept": fragment.kept,
            "compression": fragment.compression.state_dict(per_rank),
        }
        for i, fragment in enumerate(fragments)
    }
    for name, part in parts.items():
        part[key] = schema.sum_of(name, part, _ANCHORS)
    if outer := progress["outer_optimizer"]:
        outer[key] = schema.sum_of("", outer, _OUTER)
    state = {"version": schema.VERSION, **progress, "fragments": parts}
    state[schema.CHECKSUM] = schema.sum_of("", state, _NUMBERS)
    return state


def load(
    now: Progress, group: dist.ProcessGroup, fragments: Sequence[Fragment], state: Any
) -> Progress:
    """Loads a saved state, which may hold anything, into the fragments. Collective.

    Returns:
        What takes the place of the present progress.
    """
    function = f"{now['kind']}.load_state_dict"
    same = equality_of(f"the states that {function} loads")
    loaded, _ = agree(group, function, lambda: _read(now, fragments, state), same)
    parts = [state["fragments"][str(i)] for i in range(len(fragments))]
    for fragment, part, compression in zip(fragments, parts, loaded, strict=True):
        fragment.discard()  # Its mean would move parameters that may have been loaded already.
        fragment.attachment.load(compression)
        with torch.no_grad():
            for name, anchor in fragment.anchors.items():
                anchor.copy_(part["anchors"][name])
        if compression.per_rank:
            fragment.kept = part["kept"]
        else:
            fragment.reset()
    return {field: state[field] for field in now}


def _read(
    now: Progress, fragments: Sequence[Fragment], state: Any
) -> tuple[list[Loaded], dict[str, Any]]:
    """Returns the compressions of a state, checked, and what must be equal on all processes."""
    parts = {
        str(i): {
            "anchors": schema.like(fragment.anchors),
            "kept": schema.rule("a finite number >= 0", _is_share),
            "compression": schema.anything,
        }
        for i, fragment in enumerate(fragments)
    }
    header = {
        "version": schema.equal_to(schema.VERSION),
        "kind": schema.equal_to(now["kind"]),
        "step": schema.count,
        "rounds": schema.count,
        "outer_optimizer": _of_outer(now["outer_optimizer"]),
        "fragments": Exactly(parts),
    }
    schema.check("", state, header)
    key = _checksum_key(fragments)
    sums, loaded = [schema.verify("", "", state, _NUMBERS)], []
    if outer := state["outer_optimizer"]:
        sums.append(schema.verify("outer_optimizer", "", outer, _OUTER, key))
        sums.append(schema.checksum(outer["param_groups"]))
    for i, fragment in enumerate(fragments):
        place, part = schema.entry("fragments", str(i)), state["fragments"][str(i)]
        schema.verify(place, str(i), part, _ANCHORS, key)
        sums.append(schema.checksum(part["anchors"]))  # each process keeps a share of its own
        of_compression = schema.entry(place, "compression")
        loaded.append(fragment.attachment.read(part["compression"], of_compression))
    kinds = {compression.per_rank for compression in loaded}
    require(len(kinds) == 1, "per_rank of the checkpoint", "the same in all fragments", kinds)
    same = {"step": state["step"], "rounds": state["rounds"], "checksum": schema.checksum(sums)}
    return loaded, {**same, "fragments": [compression.same for compression in loaded]}


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf


def _of_outer(now: dict[str, Any] | None) -> Schema:
    """Returns the schema of an outer optimizer's state, by its present one."""
    if now is None:
        return schema.equal_to(None)

    def are_numbers(value: Any) -> bool:
        return isinstance(value, list) and all(type(i) is int and i in now["state"] for i in value)

    return {
        "state": schema.like(now["state"]),
        "moved": schema.rule("a list of the numbers of parameters", are_numbers),
        "param_groups": [_of_group(group) for group in now["param_groups"]],
    }


def _of_group(now: dict[str, Any]) -> Schema:
    def check_group(place: str, value: Any) -> None:
        schema.check(place, value, {"params": schema.like(now["params"])})
        shared = {key: schema.like(now[key]) for key in now if key in value}
        schema.check(place, value, shared)  # A scheduler adds keys.

    return check_group


def _checksum_key(fragments: Sequence[Fragment]) -> str:
    """Returns the key of the checksums of what this process holds, which is a shard with FSDP2."""
    shard = fragments[0].attachment.shard
    return f"{schema.CHECKSUM} of {shard}" if shard else schema.CHECKSUM
