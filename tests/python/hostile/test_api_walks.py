# SPDX-License-Identifier: BSD-3-Clause
"""Walks through the API: calls in random order, wrong ones among them, on two ranks.

The ranks hold the exact model: the sum of outputs and the mean residual is that of the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from api_walk import WORLD_SIZE, ApiWalk
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.examples import FIXED
from support.rank_pool import RankPool
from support.state_damage import VALUES, Damage

POOL = RankPool(WORLD_SIZE, ApiWalk)

OPTIONS = st.fixed_dictionaries(
    {
        "scope": st.sampled_from(["backward", "backward", "attached", "never"]),
        "start_powerSGD_iter": st.sampled_from([0, 1, 2, 10**9]),
        "matrix_approximation_rank": st.sampled_from([1, 2, 3]),
        "use_error_feedback": st.sampled_from([True, True, True, False]),
        "warm_start": st.booleans(),
        "wire_dtype": st.sampled_from([None, None, "bfloat16", "int8", "int4"]),
        "residual_dtype": st.sampled_from(["float32", "float32", "bfloat16"]),
        "check_every": st.sampled_from([0, 0, 1, 3]),
    }
)
# A mapping that is laid over the options of the group; most of these are wrong.
GIVEN: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.none(),
    st.just({}),
    st.sampled_from(
        [5, "always", [], {"rank": 1}, {5: 1}, {"scope": None}, {"min_numel": 10**400}]
    ),
    OPTIONS,
)
DAMAGES = st.builds(
    Damage,
    st.sampled_from(
        [
            (),
            ("step",),
            ("version",),
            ("grad_scale",),
            ("parameters",),
            ("per_rank",),
            *(("parameters", i) for i in range(5)),
            *(("parameters", i, k) for i in range(5) for k in range(5)),
        ]
    ),
    st.sampled_from([*VALUES]),
    st.sampled_from([None, None, 0, 1]),
)


in_group = precondition(lambda self: self.grouped)
with_module = precondition(lambda self: self.made and self.grouped)
with_handle = precondition(lambda self: self.handled and self.grouped)


class Walk(RuleBasedStateMachine):
    """The parent's side: it draws the calls, and compares the ranks' replies."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.grouped = self.made = self.handled = self.attached = False
        self.others = self.saved = 0

    def all_ranks(self, method: str, *args: Any) -> Any:
        """Calls a method on all ranks, and returns what all of them reply."""
        replies = POOL.call(method, *args)
        assert all(reply == replies[0] for reply in replies), (method, args, replies)
        return replies[0]

    def tries(self, method: str, *args: Any) -> bool:
        """The same for a call that may be refused, with a ValueError that says why."""
        kind, message = self.all_ranks(method, *args)
        assert kind in ("", "ValueError"), (method, args, kind, message)
        assert not kind or len(message) < 800, message
        return not kind

    @initialize(options=OPTIONS, module=st.sampled_from([True, True, True, False]))
    def begin(self, options: dict[str, Any], module: bool) -> None:
        self.clear()
        self.all_ranks("begin", options)
        self.grouped = True
        if module:
            self.make("float32", {})
            self.attach(None)
            self.step(None, 1)
            self.save(per_rank=False)

    @precondition(lambda self: not self.grouped)
    @rule(options=OPTIONS, module=st.booleans())
    def begin_again(self, options: dict[str, Any], module: bool) -> None:
        self.begin(options, module)

    @in_group
    @rule(
        dtype=st.sampled_from(["float32", "float32", "float64"]),
        arguments=st.sampled_from([{}, {"bucket_cap_mb": 0.002}, {"find_unused_parameters": True}]),
    )
    def make(self, dtype: str, arguments: dict[str, Any]) -> None:
        self.all_ranks("make", dtype, arguments)
        self.made, self.handled, self.attached = True, False, False

    @with_module
    @rule(options=GIVEN)
    def attach(self, options: Any) -> None:
        begins = self.tries("attach", options)
        assert not (begins and self.attached), "a second attach is an error"
        self.handled, self.attached = self.handled or begins, self.attached or begins

    @with_handle
    @rule()
    def detach(self) -> None:
        self.all_ranks("check")
        assert self.tries("detach") == self.attached
        self.attached = False

    @with_module
    @rule(override=st.sampled_from([None, None, None, "always", "never"]), count=st.integers(1, 3))
    def step(self, override: str | None, count: int) -> None:
        for _ in range(count):
            self.all_ranks("step", override)

    @with_module
    @rule()
    def step_without_synchronization(self) -> None:
        self.all_ranks("step", None, True)

    @with_module
    @rule(where=st.sampled_from(["forward", "early", "late"]))
    def fail(self, where: str) -> None:
        kind, _ = self.all_ranks("fail", where)
        assert kind in ("AttributeError", "KeyError", "ArithmeticError", "dead"), kind

    @with_handle
    @rule()
    def skip(self) -> None:
        assert self.tries("skip") == self.attached

    @with_handle
    @rule(scale=st.sampled_from([1.0, 4, 2.0**15, 0, -1, None, "2", float("nan"), 10**400, []]))
    def set_scale(self, scale: Any) -> None:
        assert self.tries("set_scale", scale) == (scale in (1.0, 4, 2.0**15) and self.attached)

    @with_handle
    @rule(per_rank=st.booleans())
    def save(self, per_rank: bool) -> None:
        saved = self.tries("save", per_rank)
        assert saved == self.attached
        self.saved += saved

    @precondition(lambda self: self.saved and self.handled and self.grouped)
    @rule(index=st.integers(0, 9))
    def load(self, index: int) -> None:
        kind, message = self.all_ranks("load", index, None)
        assert kind in ("", "other options") or not self.attached or "per" in message, message

    @precondition(lambda self: self.saved and self.handled and self.grouped)
    @rule(index=st.integers(0, 9), damage=DAMAGES)
    def load_something_else(self, index: int, damage: Damage) -> None:
        self.tries("load", index, damage)

    @in_group
    @rule()
    def check(self) -> None:
        self.all_ranks("check")

    @in_group
    @rule(reset=st.booleans())
    def stats(self, reset: bool) -> None:
        self.all_ranks("stats", reset)

    @precondition(lambda self: self.grouped and self.others < 3)
    @rule(options=GIVEN)
    def make_a_group(self, options: Any) -> None:
        self.others += self.tries("begin_with", options)

    @precondition(lambda self: self.others)
    @rule(index=st.integers(0, 9))
    def destroy_a_group(self, index: int) -> None:
        self.all_ranks("destroy_group", index)
        self.others -= 1

    @in_group
    @rule(
        index=st.integers(0, 9),
        numel=st.sampled_from([0, 1, 7, 300]),
        op=st.sampled_from(["SUM", "MAX", "MIN"]),
    )
    def all_reduce(self, index: int, numel: int, op: str) -> None:
        self.all_ranks("all_reduce", index, numel, op)

    @in_group
    @rule(which=st.integers(0, 4))
    def wrong_collective(self, which: int) -> None:
        assert self.all_ranks("wrong_collective", which)

    @in_group
    @rule()
    def end(self) -> None:
        self.all_ranks("end")
        self.grouped = False
        self.others = 0

    @precondition(lambda self: self.handled and not self.grouped)
    @rule()
    def use_a_module_whose_group_is_gone(self) -> None:
        self.all_ranks("use_orphan")

    def teardown(self) -> None:
        if self.grouped:
            self.all_ranks("check")


@pytest.fixture(scope="module", autouse=True)
def _pool() -> Iterator[None]:
    yield
    POOL.close()


@pytest.mark.parametrize(
    ("walks", "calls"), [(40, 25), pytest.param(400, 50, marks=pytest.mark.long)]
)
def test_walks(walks: int, calls: int) -> None:
    run_state_machine_as_test(
        Walk, settings=settings(FIXED, max_examples=walks, stateful_step_count=calls)
    )
