# SPDX-License-Identifier: BSD-3-Clause
"""Saved states hold plain values, and damage to one is an error on every rank or does no harm."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support import ranks
from support.damaged_loads import FIELDS, OPTIONS, DamagedLoads, plain_types
from support.examples import FIXED
from support.rank_pool import RankPool
from support.state_damage import VALUES, Damage
from support.synthetic import SHAPES, from_bytes, gradients, make_compressed, step, to_bytes
from torch_powersgd import checkpoint_checks

POOL = RankPool(2, DamagedLoads)
LONG = settings(FIXED, max_examples=2000)

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


@pytest.fixture(scope="module", autouse=True)
def _pool() -> Iterator[None]:
    yield
    POOL.close()


def check(damage: Damage, per_rank: bool, wire: str | None) -> None:
    first, second = POOL.call("load", damage, per_rank, wire)
    assert first == second
    kind, message = first
    assert kind in ("", "ValueError"), (kind, message)
    assert len(message) < 800, "the message is cut"


@FIXED
@given(DAMAGES, st.booleans(), st.sampled_from([None, "int8"]))
def test_a_damaged_state(damage: Damage, per_rank: bool, wire: str | None) -> None:
    check(damage, per_rank, wire)


@pytest.mark.long
@LONG
@given(DAMAGES, st.booleans(), st.sampled_from([None, "int8"]))
def test_many_damaged_states(damage: Damage, per_rank: bool, wire: str | None) -> None:
    check(damage, per_rank, wire)


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        ((), "list", "the checkpoint must be a dict, got list"),
        ((), "empty dict", "the checkpoint has no version"),
        (("version",), "zero", "version of the checkpoint must be 1, got 0"),
        (("step",), "gone", "the checkpoint has no step"),
        (("parameters",), "gone", "the checkpoint has no parameters"),
        (("grad_scale",), "gone", "the checkpoint has no grad_scale"),
        (("per_rank",), "gone", "the checkpoint has no per_rank"),
        (("per_rank",), "zero", "per_rank of the checkpoint must be True or False, got 0"),
        (("parameters", 0, "residual"), "gone", "must have q, residual"),
        (("parameters", 0, "q"), "gone", "must have q, residual"),
        (("parameters", 0, "residual"), "one row more", "'weights.conv'"),
        (("parameters", 0, "q"), "transposed", "'weights.conv'"),
        (("parameters",), "list", "parameters of the checkpoint must be a dict"),
        (("parameters", 0), "none", "must be a dict, got NoneType"),
        (("parameters", 0), "renamed", "parameter 5 must have a name of text"),
        (("step",), "minus one", "step of the checkpoint must be an integer from 0"),
        (("step",), "scalar tensor", "step of the checkpoint must be an integer from 0"),
        (("grad_scale",), "zero", "grad_scale of the checkpoint must be a finite number > 0"),
        (("grad_scale",), "denormal", "grad_scale of the checkpoint must be at least 2.94e-39"),
        (("version",), "two numbers", "version of the checkpoint must be 1"),
        (("parameters", 0, "residual"), "NaN inside", "must be finite"),
        (("parameters", 0, "residual"), "sparse", "must be a dense tensor"),
        (("parameters", 0, "residual"), "complex", "must be a dense tensor"),
        (("parameters", 0, "q"), "infinity inside", "must be finite in float32, got inf"),
        (("parameters", 0, "q"), "huge numbers", "must be finite in float32, got "),
        (("parameters", 0, "q"), "meta", "must be a dense tensor"),
        (("parameters", 0, "q"), "claims 2**50 rows", "holds all of its elements"),
        (("parameters", 0, "q"), "no rows", "must have 1 to 1024 rows"),
    ],
)
@pytest.mark.parametrize("only", [None, 1])
def test_a_state_that_does_not_fit_is_refused(
    place: tuple[str | int, ...], value: str, part: str, only: int | None
) -> None:
    for kind, message in POOL.call("load", Damage(place, value, only), False, None):
        assert kind == "ValueError"
        assert part in message
        assert message.startswith("rank 1: ") == (only == 1)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("grad_scale", "denormal", "must be at least 2.94e-39, got 5e-324"),
        ("memory", "huge numbers", "must be finite in float32, got "),
        ("q_local", "huge numbers", "must be finite in float32, got "),
    ],
)
def test_numbers_of_a_rank_that_are_refused(field: str, value: str, part: str) -> None:
    for kind, message in POOL.call("load", Damage(("parameters", 0, field), value), True, None):
        assert kind == "ValueError"
        assert part in message


@pytest.mark.parametrize("field", ["memory", "q_local"])
def test_numbers_of_a_rank_that_float32_does_not_hold_over_their_scale(field: str) -> None:
    entry: dict[str, Any] = dict.fromkeys(checkpoint_checks.LOCAL_FIELDS, torch.zeros(3, 2))
    entry |= {field: torch.full((3, 2), -3e38), "grad_scale": 0.5}
    with pytest.raises(ValueError, match=f"^{field} of .*'w' must be finite .* over its .*, 0.5"):
        checkpoint_checks.to_local("w", entry)


def test_mean_residuals_that_float32_does_not_hold_over_their_scale() -> None:
    entry = {"residual": torch.full((3, 2), -3e38), "q": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match="^residual of .*'w' must be finite .* over its .*, 0.5"):
        checkpoint_checks.to_mean("w", entry, checkpoint_checks.Saved(0, 0.5, False, {}))


def test_nothing_is_allocated_by_a_size_that_a_state_claims() -> None:
    """The address space has room for the model, and none for what the states claim."""
    assert all(POOL.call("load_with_little_memory"))


@pytest.mark.parametrize(
    ("place", "value"),
    [(("grad_scale",), "a fraction"), (("parameters", 0, "q"), "large numbers")],
)
def test_ranks_with_different_states_are_refused(place: tuple[str | int, ...], value: str) -> None:
    for kind, message in POOL.call("load", Damage(place, value, 1), False, None):
        assert kind == "ValueError"
        assert "must be the same on all ranks: that of rank 1 differs from rank 0's" in message


# Every option that changes what a state holds.
VARIANTS: list[dict[str, Any]] = [
    {},
    {"use_error_feedback": False},
    {"residual_dtype": "float16"},
    {"warm_start": False},
    {"warm_start_noise": 0.5},
    {"wire_dtype": "int8"},
    {"wire_dtype": "int4"},
    {"wire_dtype": "bfloat16"},
    {"scope": "never"},
    {"start_powerSGD_iter": 100},
]
PLAIN = {dict, list, int, float, bool, str, type(None), torch.Tensor}


def _types(rank: int) -> list[set[type]]:
    found = []
    for variant in VARIANTS:
        ddp, compression = make_compressed(SHAPES, dataclasses.replace(OPTIONS, **variant))
        for i in range(3):
            step(ddp, gradients(SHAPES, rank, i))
        for per_rank in (False, True):
            state = compression.state_dict(per_rank)
            compression.load_state_dict(from_bytes(to_bytes(state)))  # by weights_only=True
            found.append(plain_types(state))
    return found


def test_a_state_of_every_option_is_read_without_code() -> None:
    for found in ranks.run(2, _types, timeout=180):
        assert len(found) == 2 * len(VARIANTS)
        for types in found:
            assert types <= PLAIN, types


class Payload:
    """An object whose unpickling would run code."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of a checkpoint has run",))


def test_a_state_with_code_is_not_read() -> None:
    """The documented way to load refuses it before ``load_state_dict`` sees anything."""
    data = to_bytes({"version": 1, "step": Payload()})
    with pytest.raises(Exception, match="[Ww]eights.only|Unsupported"):
        from_bytes(data)
