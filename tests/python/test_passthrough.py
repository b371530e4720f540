# SPDX-License-Identifier: BSD-3-Clause
"""Everything that is not compressed gives, bit for bit, what the inner backend gives."""

from __future__ import annotations

import pytest
import ranks
import torch.distributed as dist
from collective_cases import CASES, run_case

import torch_powersgd as tp

WORLD_SIZE = 3

# What Gloo may refuse. A case that is not listed and raises through Gloo as well would compare
# nothing.
MAY_RAISE = ()


def _run_all(rank: int) -> dict[str, tuple]:
    gloo = dist.new_group(backend="gloo")
    results = {name: (run_case(name, gloo), run_case(name, dist.group.WORLD)) for name in CASES}
    assert tp.stats()["compressed_calls"] == 0
    return results


@pytest.fixture(scope="module", params=["backward", "never"])
def results(request):
    """{case: (through gloo, through the wrapper)} of each rank, by scope."""
    options = tp.Options(scope=request.param, start_powerSGD_iter=0)
    return ranks.run(WORLD_SIZE, _run_all, options=options)


@pytest.mark.parametrize("name", CASES)
def test_gives_what_gloo_gives(results, name):
    for rank, mine in enumerate(results):
        gloo, wrapped = mine[name]
        assert wrapped == gloo, f"on rank {rank}"
