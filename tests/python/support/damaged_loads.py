# SPDX-License-Identifier: BSD-3-Clause
"""One rank's side of loading damaged states into an attached module."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.api_walk import Outcome, outcome_of
from support.state_damage import Damage
from support.synthetic import (
    SHAPES,
    from_bytes,
    gradients,
    make_compressed,
    step,
    to_bytes,
    without_checksums,
)

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
FIELDS = ["residual", "q", "memory", "p_hat", "q_local", "q_warm", "grad_scale"]
STEPS = 3


class DamagedLoads:
    """The modules of one rank, and their states after some steps."""

    def __init__(self, rank: int) -> None:
        warnings.simplefilter("ignore")
        self.rank = rank
        ranks.init_group("cpu:powersgd", OPTIONS, 300)
        self.models: dict[str | None, tuple[DistributedDataParallel, tp.Compression]] = {}
        self.states: dict[tuple[str | None, bool], bytes] = {}
        for wire in (None, "int8"):
            ddp, compression = self.models[wire] = make_compressed(SHAPES, {"wire_dtype": wire})
            for i in range(STEPS):
                step(ddp, gradients(SHAPES, rank, i))
            for per_rank in (False, True):
                # With checksums, every damage would be found by them alone.
                state = without_checksums(compression.state_dict(per_rank))
                self.states[wire, per_rank] = to_bytes(state)

    def load(self, damage: Damage, per_rank: bool, wire: str | None) -> Outcome:
        """Loads a damaged state. If it is refused nothing may change, else training goes on."""
        ddp, compression = self.models[wire]
        state = from_bytes(self.states[wire, per_rank])
        try:
            state = damage.apply(state, self.rank)
        except Exception:
            return "", ""  # The state has no such place.
        before = to_bytes(compression.state_dict(True))
        outcome = outcome_of(lambda: compression.load_state_dict(state))
        if outcome[0]:
            assert before == to_bytes(compression.state_dict(True)), "something has changed"
            return outcome
        for i in range(2):
            outputs = step(ddp, gradients(SHAPES, self.rank, i))
            assert all(bool(output.isfinite().all()) for output in outputs.values()), damage
        for entry in compression.state_dict()["parameters"].values():
            assert bool(entry["residual"].isfinite().all())
            assert not entry["residual"].requires_grad
        compression.load_state_dict(from_bytes(self.states[wire, True]))
        return outcome

    def load_with_little_memory(self) -> bool:
        """Loads states that claim much more than there is, where no memory is left for it."""
        compression, data = self.models[None][1], self.states[None, False]
        for value in ("claims 2**50 rows", "no rows", "one row more"):
            for field in ("residual", "q"):
                for index in range(3):
                    state = Damage(("parameters", index, field), value).apply(
                        from_bytes(data), self.rank
                    )
                    with _address_space(512 * 2**20):
                        outcome = outcome_of(lambda s=state: compression.load_state_dict(s))  # type: ignore[misc]
                    assert outcome[0] in ("", "ValueError"), outcome
                    assert outcome[0] or value == "one row more"
        compression.load_state_dict(from_bytes(data))
        return True


@contextmanager
def _address_space(more: int) -> Iterator[None]:
    """Limits the address space to what the process has and so many bytes more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def plain_types(state: Any) -> set[type]:
    """The types of all values in a state."""
    if isinstance(state, dict):
        return {dict}.union(*(plain_types(value) for value in state.values()))
    if isinstance(state, (list, tuple)):
        return {type(state)}.union(*(plain_types(value) for value in state))
    return {torch.Tensor if isinstance(state, torch.Tensor) else type(state)}
