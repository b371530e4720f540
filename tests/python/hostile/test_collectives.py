# SPDX-License-Identifier: BSD-3-Clause
"""Collectives on tensors of every kind: the result or the error of Gloo, to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.examples import FIXED
from support.odd_collectives import COLLECTIVES, OPS, OddCollectives
from support.odd_tensors import KINDS
from support.rank_pool import RankPool

POOL = RankPool(2, OddCollectives)
LONG = settings(FIXED, max_examples=1500)

SIZES = st.sampled_from([1, 2, 3, 7, 16, 40])
Tensor = tuple[str, int, int, str]  # kind, rows, columns, and the operation that reduces it
TENSORS = st.tuples(st.sampled_from([*KINDS]), SIZES, SIZES, st.sampled_from(OPS))


@pytest.fixture(scope="module", autouse=True)
def _pool() -> Iterator[None]:
    yield
    POOL.close()


def compare(collective: str, kind: str, rows: int, cols: int, op: str) -> None:
    if (collective, kind) == ("scatter", "conjugated"):
        return  # Gloo refuses it on the root alone, so that the others would wait for it.
    first, second = POOL.call("compare", collective, kind, rows, cols, op)
    assert first == second


@FIXED
@given(st.sampled_from([*COLLECTIVES]), TENSORS)
def test_what_is_not_compressed_is_as_over_gloo(collective: str, tensor: Tensor) -> None:
    compare(collective, *tensor)


@pytest.mark.long
@LONG
@given(st.sampled_from([*COLLECTIVES]), TENSORS)
def test_many_that_are_not_compressed(collective: str, tensor: Tensor) -> None:
    compare(collective, *tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_all_reduced_as_over_gloo(kind: str) -> None:
    compare("all_reduce", kind, 16, 7, "SUM")


@FIXED
@given(TENSORS)
def test_what_is_compressed_is_equal_on_all_ranks(tensor: Tensor) -> None:
    gloo, ours = zip(*POOL.call("compress", *tensor), strict=True)
    # Gloo itself leaves some kinds as they were, such as a negated view.
    assert ours[0] == ours[1] or gloo[0] != gloo[1]
