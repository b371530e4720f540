# SPDX-License-Identifier: BSD-3-Clause
"""Beside an attached module, every other all-reduce of its group has the bits of plain Gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.beside_attached import CASES, BesideAttached
from support.rank_pool import RankPool

POOL = RankPool(2, BesideAttached)


@pytest.fixture(scope="module", autouse=True)
def _pool() -> Iterator[None]:
    yield
    POOL.close()


@pytest.mark.parametrize("name", CASES)
def test_what_has_no_name_is_exact(name: str) -> None:
    for exact, warnings, compressed, steps, trained in POOL.call("run", name):
        assert exact
        assert warnings == []
        assert compressed  # the module itself
        assert steps == trained
