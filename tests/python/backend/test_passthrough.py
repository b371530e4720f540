# SPDX-License-Identifier: BSD-3-Clause
"""All collectives that are not compressed give the inner backend's results, bit for bit."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from collective_cases import CASES, run_case

import torch_powersgd as tp
from support import ranks

SCOPES = ("backward", "never")

# Gloo may refuse these, depending on its release. An error of any other case would mean that the
# case itself is wrong and compares nothing.
MAY_RAISE = re.compile("AVG|BAND|BOR|BXOR|int16|complex|premultiplied|wrong|different")


def _run_all(rank: int) -> tuple[list[str], list[str]]:
    """The cases that raise over Gloo, and those that end in another way in a group of a scope."""
    gloo = dist.new_group(backend="gloo")
    groups = []
    for scope in SCOPES:
        options = tp.Options.hook_defaults(scope=scope, start_powerSGD_iter=0)
        groups.append(dist.new_group(backend="cpu:powersgd", pg_options=options))
    raising, different = [], []
    for name in CASES:
        expected = run_case(name, gloo)
        raising += [name] if expected[0] == "raises" else []
        found = [run_case(name, group) for group in groups]
        different += [] if found == [expected] * len(groups) else [f"{name}: {found}, {expected}"]
    for group in groups:
        assert tp.stats(group)["compressed_calls"] == 0
    return raising, different


@pytest.fixture(scope="module")
def ended() -> list[tuple[list[str], list[str]]]:
    return ranks.run(3, _run_all)


def test_all_collectives_give_what_gloo_gives(ended: list[tuple[list[str], list[str]]]) -> None:
    for _, different in ended:
        assert different == []


def test_the_cases_run(ended: list[tuple[list[str], list[str]]]) -> None:
    raising = ended[0][0]
    if torch.__version__ < "2.12":  # Gloo lacked it.
        raising.remove("all_to_all")
    assert [name for name in raising if not MAY_RAISE.search(name)] == []
    # The cases also have calls that Gloo lacks.
    assert "all_reduce BAND float32" in raising
