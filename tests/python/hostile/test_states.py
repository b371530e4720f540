# SPDX-License-Identifier: BSD-3-Clause
"""Saved states hold plain values, and damage to one is an error on every rank or does no harm."""

from __future__ import annotations

import dataclasses
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.examples import check_examples, examples
from support.on_ranks import on_ranks
from support.rank_pool import RankPool
from support.state_damage import VALUES, Damage, Outcome, outcome_of
from support.synthetic import (
    SHAPES,
    from_bytes,
    gradients,
    make_compressed,
    step,
    to_bytes,
    without_checksums,
)
from torch_powersgd import checkpoint_checks

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


PLACES = st.one_of(
    st.just(()),
    st.sampled_from(
        [(field,) for field in ("version", "step", "grad_scale", "parameters", "per_rank")]
    ),
    st.integers(0, 4).map(lambda i: ("parameters", i)),
    st.tuples(st.just("parameters"), st.integers(0, 4), st.sampled_from(FIELDS)),
)
DAMAGES = st.one_of(
    st.builds(Damage, PLACES, st.sampled_from([*VALUES]), st.sampled_from([None, 0, 1])),
    st.builds(
        Damage,
        PLACES.filter(len),
        st.sampled_from(["gone", "renamed"]),
        st.sampled_from([None, 0, 1]),
    ),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(2, DamagedLoads)
    yield pool
    pool.close()


@examples(100, 2000)
def test_a_damaged_state(pool: RankPool, count: int) -> None:
    def check(damage: Damage, per_rank: bool, wire: str | None) -> None:
        first, second = pool.call("load", damage, per_rank, wire)
        assert first == second
        kind, message = first
        assert kind in ("", "ValueError"), (kind, message)
        assert len(message) < 800, "the message is cut"

    check_examples(count, check, DAMAGES, st.booleans(), st.sampled_from([None, "int8"]))


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        ((), "list", "the checkpoint must be a dict, got list"),
        (("version",), "zero", "version of the checkpoint must be 1, got 0"),
        (("step",), "gone", "the checkpoint has no step"),
        (("parameters",), "gone", "the checkpoint has no parameters"),
        (("grad_scale",), "gone", "the checkpoint has no grad_scale"),
        (("per_rank",), "gone", "the checkpoint has no per_rank"),
        (("per_rank",), "zero", "per_rank of the checkpoint must be True or False, got 0"),
        (("parameters", 0, "residual"), "gone", "must have q, residual"),
        (("parameters", 0, "residual"), "one row more", "'weights.conv'"),
        (("parameters",), "list", "parameters of the checkpoint must be a dict"),
        (("parameters", 0), "none", "must be a dict, got NoneType"),
        (("parameters", 0), "renamed", "parameter names in the checkpoint must be strings, got 5"),
        (("step",), "minus one", "step of the checkpoint must be an integer from 0"),
        (("grad_scale",), "zero", "grad_scale of the checkpoint must be a finite number > 0"),
        (("grad_scale",), "denormal", "grad_scale of the checkpoint must be at least 2.94e-39"),
        (("parameters", 0, "residual"), "NaN inside", "must be finite"),
        (("parameters", 0, "residual"), "sparse", "must be a dense floating-point tensor"),
        (("parameters", 0, "q"), "infinity inside", "must be finite in float32, got inf"),
        (("parameters", 0, "q"), "meta", "must be a dense floating-point tensor"),
        (("parameters", 0, "q"), "claims 2**50 rows", "with storage for all of its elements"),
        (("parameters", 0, "q"), "no rows", "must have 1 to 1024 rows"),
    ],
)
@pytest.mark.parametrize("only", [None, 1])
def test_a_state_that_does_not_fit_is_refused(
    pool: RankPool, place: tuple[str | int, ...], value: str, part: str, only: int | None
) -> None:
    for kind, message in pool.call("load", Damage(place, value, only), False, None):
        assert kind == "ValueError"
        assert part in message
        assert message.startswith("rank 1: ") == (only == 1)


@pytest.mark.parametrize("field", ["memory", "q_local"])
def test_numbers_of_a_rank_that_float32_does_not_hold(pool: RankPool, field: str) -> None:
    damage = Damage(("parameters", 0, field), "huge numbers")
    for kind, message in pool.call("load", damage, True, None):
        assert kind == "ValueError"
        assert "must be finite in float32, got " in message
    # Those that it holds, but not over their scale.
    entry: dict[str, Any] = dict.fromkeys(checkpoint_checks.LOCAL_FIELDS, torch.zeros(3, 2))
    entry |= {field: torch.full((3, 2), -3e38), "grad_scale": 0.5}
    with pytest.raises(
        ValueError, match=f"^{field} of .*'w' must be finite .* division by its .*, 0.5"
    ):
        checkpoint_checks.to_local("w", entry)


def test_mean_residuals_that_float32_does_not_hold_over_their_scale() -> None:
    entry = {"residual": torch.full((3, 2), -3e38), "q": torch.zeros(1, 2)}
    with pytest.raises(
        ValueError, match="^residual of .*'w' must be finite .* division by its .*, 0.5"
    ):
        checkpoint_checks.to_mean("w", entry, checkpoint_checks.Saved(0, 0.5, False, {}))


def test_nothing_is_allocated_by_a_size_that_a_state_claims(pool: RankPool) -> None:
    """The address space has room for the model, and none for what the states claim."""
    assert all(pool.call("load_with_little_memory"))


@pytest.mark.parametrize(
    ("place", "value"),
    [(("grad_scale",), "a fraction"), (("parameters", 0, "q"), "large numbers")],
)
def test_ranks_with_different_states_are_refused(
    pool: RankPool, place: tuple[str | int, ...], value: str
) -> None:
    for kind, message in pool.call("load", Damage(place, value, 1), False, None):
        assert kind == "ValueError"
        assert "must be the same on all ranks, but rank 1's differs from rank 0's" in message


# Every option that changes what a state holds.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_error_feedback": False},
    {"residual_dtype": "bfloat16"},
    {"warm_start": False},
    {"wire_dtype": "int8"},
    {"wire_dtype": "int4"},
    {"wire_dtype": "bfloat16"},
    {"scope": "never"},
    {"start_powerSGD_iter": 100},
]
PLAIN = {dict, list, int, float, bool, str, type(None), torch.Tensor}


@on_ranks()
def test_a_state_of_every_option_is_read_without_code(rank: int) -> None:
    for variant in VARIANTS:
        ddp, compression = make_compressed(SHAPES, dataclasses.replace(OPTIONS, **variant))
        for i in range(3):
            step(ddp, gradients(SHAPES, rank, i))
        for per_rank in (False, True):
            state = compression.state_dict(per_rank)
            compression.load_state_dict(from_bytes(to_bytes(state)))  # by weights_only=True
            assert _types(state) <= PLAIN, variant


def _types(state: Any) -> set[type]:
    """The types of all values in a state."""
    if isinstance(state, dict):
        return {dict}.union(*map(_types, state.values()))
    if isinstance(state, (list, tuple)):
        return {type(state)}.union(*map(_types, state))
    return {torch.Tensor if isinstance(state, torch.Tensor) else type(state)}


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of a checkpoint has run",))


def test_a_state_with_code_is_not_read() -> None:
    """The documented way to load refuses it before ``load_state_dict`` sees anything."""
    data = to_bytes({"version": 1, "step": Payload()})
    with pytest.raises(Exception, match="[Ww]eights.only|Unsupported"):
        from_bytes(data)
