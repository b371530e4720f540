# SPDX-License-Identifier: BSD-3-Clause
"""All collectives that are not compressed give the inner backend's results, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.collectives import CASES, run_case

WORLD_SIZE = 3
SCOPES = ("backward", "never")

GLOO_LACKS_ALL_TO_ALL = torch.__version__ < "2.12"

# Gloo may refuse these, depending on its release. An error of any other case would mean that the
# case itself is wrong and compares nothing.
MAY_RAISE = re.compile(
    "AVG|BAND|BOR|BXOR|int16|complex|premultiplied|unequal|stacked|wrong|different"
)


# The results of each case in the group of Gloo and in that of each scope.
Results = dict[str, dict[str, tuple[str, Any]]]


def _run_all(rank: int) -> Results:
    groups = {"gloo": dist.new_group(backend="gloo")}
    for scope in SCOPES:
        options = tp.Options.hook_defaults(scope=scope, start_powerSGD_iter=0)
        groups[scope] = dist.new_group(backend="cpu:powersgd", pg_options=options)
    results = {
        name: {key: run_case(name, group) for key, group in groups.items()} for name in CASES
    }
    for scope in SCOPES:
        assert tp.stats(groups[scope])["compressed_calls"] == 0
    return results


@pytest.fixture(scope="module")
def results() -> list[Results]:
    """The results by rank."""
    return ranks.run(WORLD_SIZE, _run_all)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scope", SCOPES)
def test_gives_what_gloo_gives(results: list[Results], name: str, scope: str) -> None:
    if name == "differentiable_collectives" and GLOO_LACKS_ALL_TO_ALL:
        pytest.skip("torch emulates what Gloo lacks in groups whose backend is named gloo")
    for rank, mine in enumerate(results):
        assert mine[name][scope] == mine[name]["gloo"], f"on rank {rank}"


def test_the_cases_run(results: list[Results]) -> None:
    raising = [name for name in CASES if results[0][name]["gloo"][0] == "raises"]
    if GLOO_LACKS_ALL_TO_ALL:
        raising.remove("all_to_all")
    assert [name for name in raising if not MAY_RAISE.search(name)] == []
    # The cases also have calls that Gloo lacks.
    assert "all_reduce BAND float32" in raising
