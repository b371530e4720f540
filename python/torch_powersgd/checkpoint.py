# SPDX-License-Identifier: BSD-3-Clause
"""The state of a compression, which ``Compression.state_dict`` documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from torch_powersgd import checkpoint_checks, checksum
from torch_powersgd._core import _C
from torch_powersgd.checkpoint_checks import LOCAL_FIELDS, VERSION
from torch_powersgd.options import from_core, to_plain


def of_states(states: _C.ModelStates, per_rank: bool) -> dict[str, Any]:
    """Returns the state of a checkpoint. Collective without ``per_rank``."""
    state: dict[str, Any] = {
        "version": VERSION,
        "options": to_plain(from_core(states.options)),
        "step": states.step,
        "grad_scale": states.grad_scale,
        "per_rank": per_rank,
    }
    if per_rank:
        state["parameters"] = {
            local.name: {field: getattr(local, field) for field in LOCAL_FIELDS}
            for local in states.export_local()
        }
    else:
        state["parameters"] = {
            mean.name: {"residual": mean.residual, "q": mean.q}
            for mean in states.export_state()
            if mean.residual is not None
        }
    checksum.add(state)
    return state


NAMES = "the hash of the parameter names"  # in what `compare` takes


@dataclass(frozen=True)
class Loaded:
    """A saved state that fits.

    Attributes:
        step: Number of steps before it was saved.
        grad_scale: Units of the residuals in ``mean``.
        mean: Entries of a state without ``per_rank``, else None.
        local: Entries of a state with ``per_rank``.
        content: Checksum of the state.
    """

    step: int
    grad_scale: float
    mean: list[_C.ParameterExport] | None
    local: list[_C.LocalExport]
    content: int

    @property
    def parameters(self) -> int:
        return len(self.local if self.mean is None else self.mean)

    def plain(self) -> dict[str, Any]:
        """Returns what must be equal on all processes, in JSON types."""
        per_rank = self.mean is None
        return {
            "per_rank": per_rank,
            "step": self.step,
            "content": 0 if per_rank else self.content,
        }

    def into(self, states: _C.ModelStates) -> None:
        """Loads the state into ``states``."""
        if self.mean is None:
            states.load_local(self.local, self.step)
        else:
            states.load_state(self.mean, self.step, self.grad_scale)


def read(states: _C.ModelStates, state: Any, keys: dict[bool, str]) -> Loaded:
    """Checks a saved state, which may hold anything, and returns it.

    Args:
        states: States that it must fit.
        state: Argument of ``load_state_dict``.
        keys: Key of this process's state, with ``per_rank`` and without. It may be empty.

    Raises:
        ValueError: If it does not fit.
    """
    own = checkpoint_checks.own_state(state, keys)
    saved = checkpoint_checks.read(own)
    local: list[_C.LocalExport] = []
    mean: list[_C.ParameterExport] | None = None
    if saved.per_rank:
        local = [checkpoint_checks.to_local(*entry) for entry in saved.parameters.items()]
    else:
        mean = [checkpoint_checks.to_mean(*entry, saved) for entry in saved.parameters.items()]
    content = checksum.check(own)
    if mean is None:
        states.check_local(local)
    else:
        states.check_state(mean)
    return Loaded(saved.step, saved.grad_scale, mean, local, content)


def compare(everyone: list[dict[str, Any]]) -> str:
    """Returns an error message if the processes load different states, or an empty string."""
    first = everyone[0]
    for rank, mine in enumerate(everyone):
        if mine[NAMES] != first[NAMES]:
            return (
                f"all ranks must load the state of the same module, but rank 0 and rank {rank} "
                "load modules with different parameters"
            )
        if (mine["step"], mine["per_rank"]) != (first["step"], first["per_rank"]):
            return (
                "all ranks must load a checkpoint of the same step and kind, but rank 0 has step "
                f"{first['step']}, per_rank={first['per_rank']}, and rank {rank} has step "
                f"{mine['step']}, per_rank={mine['per_rank']}"
            )
        if mine["content"] != first["content"]:
            return (
                "a checkpoint saved without per_rank must be the same on all ranks, but rank "
                f"{rank}'s differs from rank 0's"
            )
    return ""


class PerRank(Stateful):
    """A view whose ``state_dict`` has ``per_rank``."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.whole.state_dict(per_rank=True)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.whole.load_state_dict(state_dict)
