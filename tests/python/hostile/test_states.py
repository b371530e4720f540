# SPDX-License-Identifier: BSD-3-Clause
"""Damage to a saved state is an error on every rank, which names the entry, or does no harm."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support.ddp import make_compressed, step
from support.local_job import EVERY, Job
from support.on_ranks import all_agree, on_ranks
from support.state_damage import VALUES, Damage, Outcome, outcome_of, places
from support.states import from_bytes, own_part, to_bytes, without_checksums
from support.synthetic import SHAPES, gradients
from torch_powersgd import schema

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=2)
COUNTS = ("steps", "skipped_steps", "compressed_calls", "exact_calls", "bytes_before")
KINDS = ("attach, per rank", "DiLoCo")  # have all entries of the others

Place = tuple[Any, ...]


class Attached:
    """Compressed gradients, and their state after some steps."""

    def __init__(self, rank: int, per_rank: bool) -> None:
        self.rank = rank
        options = dataclasses.replace(OPTIONS, wire_dtype="int8" if per_rank else None)
        self.ddp, self.stateful = make_compressed(SHAPES, options)
        self.go_on()
        self.good = to_bytes(self.stateful.state_dict(per_rank))
        self.go_on()
        self.before = self.everything()

    def go_on(self) -> None:
        for i in range(3):
            outputs = step(self.ddp, gradients(SHAPES, self.rank, i))
            assert all(bool(output.isfinite().all()) for output in outputs.values())
        for entry in self.stateful.state_dict()["parameters"].values():
            assert not entry["residual"].requires_grad

    def everything(self) -> bytes:
        """The residuals and factors, the counts, and the parameters of this rank."""
        counts = {key: self.stateful.stats()[key] for key in COUNTS}
        own = self.stateful.state_dict(per_rank=True)
        return to_bytes([own, counts, self.ddp.module.state_dict()])


class LocalSteps:
    """Local steps in the middle of a round, and their state after the last."""

    def __init__(self, rank: int) -> None:
        self.rank, self.job = rank, Job(outer=True)
        self.stateful = self.job.steps
        self.job.train(rank, 0, EVERY)
        self.good = to_bytes(self.stateful.state_dict())
        self.go_on()
        self.before = self.everything()

    def go_on(self) -> None:
        self.job.train(self.rank, EVERY, EVERY + 2)

    def everything(self) -> bytes:
        return to_bytes([self.job.model.state_dict(), self.stateful.state_dict(per_rank=True)])


def _make(rank: int, kind: str) -> Attached | LocalSteps:
    return LocalSteps(rank) if kind == "DiLoCo" else Attached(rank, "per rank" in kind)


def _load(subject: Attached | LocalSteps, damage: Damage, checksums: bool = False) -> Outcome:
    """Loads the damaged state. If it is refused nothing has changed, else training goes on."""
    state = from_bytes(subject.good)
    state = damage.apply(state if checksums else without_checksums(state), subject.rank)
    outcome = outcome_of(partial(subject.stateful.load_state_dict, state))
    assert all_agree(outcome), (damage, outcome)
    kind, message = outcome
    assert kind in ("", "ValueError"), (damage, outcome)
    assert len(message) < 800, "the message is cut"
    if kind:
        assert subject.everything() == subject.before, (damage, outcome)
    else:
        subject.go_on()
        subject.stateful.load_state_dict(from_bytes(subject.good))
        subject.before = subject.everything()
    return outcome


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_any_damage_in_any_place(rank: int, kind: str) -> None:
    """On one rank. What fits but differs between ranks is then loaded by all of them."""
    subject = _make(rank, kind)
    for place in places(own_part(without_checksums(from_bytes(subject.good)))):
        for value in (*VALUES, *["gone", "renamed"][: 2 * len(place)]):
            _, message = _load(subject, Damage(place, value, only=1))
            if "must be the same on all ranks" in message:
                _load(subject, Damage(place, value))
            elif message:
                assert message.startswith("rank 1: "), (place, value, message)
                # If per_rank is wrong, the entries of another kind of state are missing.
                if place and place[-1] != "per_rank":
                    assert any(str(key) in message for key in place), (place, value, message)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_the_checksums_cover_every_number(rank: int, kind: str) -> None:
    subject = _make(rank, kind)
    state = own_part(from_bytes(subject.good))
    covered = 0
    for place in places(without_checksums(state)):
        value = state
        for key in place:
            value = value[key]
        number = isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)
        if number and place != ("version",):
            _, message = _load(subject, Damage(place, "one more"), checksums=True)
            assert "does not match its crc32" in message, (place, message)
            covered += 1
    assert covered >= 4


@on_ranks(2)
def test_the_checksums_cover_names(rank: int) -> None:
    subject = Attached(rank, per_rank=True)
    parameters = own_part(state := from_bytes(subject.good))["parameters"]
    parameters["weights.tale"] = parameters.pop("weights.tall")
    _, message = outcome_of(partial(subject.stateful.load_state_dict, state))
    assert "parameters['weights.tale'] of the checkpoint does not match its crc32" in message


FIRST, RESIDUAL, Q = (("parameters", 0, *end) for end in ((), ("residual",), ("q",)))
FRAGMENT, ANCHOR = ("fragments", "0"), ("fragments", "0", "anchors", "0.weight")
OUTER = "outer_optimizer"
SCALE = "grad_scale of the checkpoint must be"

# What is allowed is said. That any damage is named by its place is tested above.
NAMED: dict[str, list[tuple[Place, str, str]]] = {
    "attach": [
        (("version",), "zero", "version of the checkpoint must be 1, got 0"),
        (("step",), "minus one", "step of the checkpoint must be an integer from 0 to 2**62, got"),
        (("per_rank",), "zero", "per_rank of the checkpoint must be True or False, got 0"),
        (FIRST, "renamed", "keys of parameters of the checkpoint must be strings, got 5"),
        (("grad_scale",), "zero", f"{SCALE} a finite number > 0"),
        (("grad_scale",), "denormal", f"{SCALE} at least 2.94e-39"),
        (
            RESIDUAL,
            "NaN inside",
            "'residual'] of the checkpoint must be finite in float32, got nan",
        ),
        (RESIDUAL, "sparse", "must be a dense floating-point tensor, got <T"),
        (Q, "claims 2**50 rows", "with storage for all of its elements"),
        (Q, "no rows", "must be a matrix of 1 to 1024 rows"),
    ],
    "attach, per rank": [((*FIRST, "memory"), "huge numbers", "must be finite in float32, got ")],
    "DiLoCo": [
        (("kind",), "text", "kind of the checkpoint must be 'DiLoCo', got 'text'"),
        (("fragments",), "empty dict", "fragments of the checkpoint must be a dict with '0'"),
        (ANCHOR, "NaN inside", "['anchors']['0.weight'] of the checkpoint must be finite, got nan"),
        (ANCHOR, "one row less", "must be a dense tensor, torch.float32 [40, 24], got <Tensor: "),
        ((OUTER, "moved"), "zero", "must be a list of the numbers of parameters, got"),
        (
            (OUTER, "state", 0, "momentum_buffer"),
            "one row less",
            "outer_optimizer['state'][0]['momentum_buffer'] of the checkpoint must be a dense",
        ),
        ((OUTER, "param_groups", 0, "lr"), "not a number", "['lr'] of the checkpoint must be a fi"),
    ],
}


@pytest.mark.parametrize("kind", NAMED)
@on_ranks(2)
def test_what_is_wrong_is_named(rank: int, kind: str) -> None:
    subject = _make(rank, kind)
    for place, value, part in NAMED[kind]:
        for only in (None, 1):
            _, message = _load(subject, Damage(place, value, only))
            assert part in message
            assert message.startswith("rank 1: ") == (only == 1)


@on_ranks(2)
def test_an_outer_optimizer_keeps_what_a_state_does_not_have(rank: int) -> None:
    subject = _make(rank, "DiLoCo")
    lacking = Damage(("outer_optimizer", "param_groups", 0, "lr"), "gone")
    assert _load(subject, lacking) == ("", "")


def test_numbers_that_float32_does_not_hold_over_their_scale() -> None:
    wanted = "w of .* must be finite in float32 after division by its grad_scale, 0.5, got 3.0"
    with pytest.raises(ValueError, match=wanted):
        schema.check("w", torch.full((3, 2), -3e38), schema.tensor(grad_scale=0.5))


@on_ranks(2)
def test_nothing_is_allocated_by_a_size_that_a_state_claims(rank: int) -> None:
    """The address space has room for the model, and none for what the states claim."""
    subject = Attached(rank, per_rank=False)
    for value in ("claims 2**50 rows", "no rows", "one row more"):
        for field in ("residual", "q"):
            damage = Damage(("parameters", 0, field), value)
            state = damage.apply(without_checksums(from_bytes(subject.good)), rank)
            with _address_space(512 * 2**20):
                kind, _ = outcome_of(partial(subject.stateful.load_state_dict, state))
            assert kind == "ValueError" or (kind == "" and value == "one row more")


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


@pytest.mark.parametrize(
    ("place", "value"), [(("grad_scale",), "a fraction"), (Q, "large numbers")]
)
@on_ranks(2)
def test_ranks_with_different_states_are_refused(rank: int, place: Place, value: str) -> None:
    _, message = _load(Attached(rank, per_rank=False), Damage(place, value, only=1))
    assert "same on all ranks: checksum of the state without per_rank is " in message
