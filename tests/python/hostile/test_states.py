# SPDX-License-Identifier: BSD-3-Clause
"""Damaged states: an error on every rank and nothing changed, or training that goes on rightly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.damaged_loads import FIELDS, DamagedLoads
from support.examples import FIXED
from support.rank_pool import RankPool
from support.state_damage import VALUES, Damage
from torch_powersgd import loading

POOL = RankPool(2, DamagedLoads)
LONG = settings(FIXED, max_examples=2000)

PLACES = st.one_of(
    st.just(()),
    st.sampled_from(["version", "step", "grad_scale", "parameters", "rank", "world_size"]).map(
        lambda field: (field,)
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


# Each of these was loaded, or raised on one rank alone, before there were checks.
@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
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
def test_a_state_that_was_not_refused(
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
def test_numbers_of_a_rank_that_were_not_refused(field: str, value: str, part: str) -> None:
    for kind, message in POOL.call("load", Damage(("parameters", 0, field), value), True, None):
        assert kind == "ValueError"
        assert part in message


@pytest.mark.parametrize("field", ["memory", "q_local"])
def test_numbers_of_a_rank_that_float32_does_not_hold_over_their_scale(field: str) -> None:
    entry: dict[str, Any] = dict.fromkeys(loading.LOCAL_FIELDS, torch.zeros(3, 2))
    entry |= {field: torch.full((3, 2), -3e38), "grad_scale": 0.5}
    with pytest.raises(ValueError, match=f"^{field} of .*'w' must be finite .* over its .*, 0.5"):
        loading.to_local("w", entry)


def test_mean_residuals_that_float32_does_not_hold_over_their_scale() -> None:
    entry = {"residual": torch.full((3, 2), -3e38), "q": torch.zeros(1, 2)}
    with pytest.raises(ValueError, match="^residual of .*'w' must be finite .* over its .*, 0.5"):
        loading.to_mean("w", entry, loading.Saved(0, 0.5, {}))


def test_nothing_is_allocated_by_a_size_that_a_state_claims() -> None:
    """The address space has room for the model, and none for what the states claim."""
    assert all(POOL.call("load_with_little_memory"))


def test_ranks_with_different_scales_are_refused() -> None:
    for kind, message in POOL.call("load_scales"):
        assert kind == "ValueError"
        assert "must be the same on all ranks: that of rank 1 differs from rank 0's" in message
