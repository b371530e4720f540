# SPDX-License-Identifier: BSD-3-Clause
"""The options of a new process group: which source applies, and what ranks that disagree get."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.ddp import make_ddp
from support.on_ranks import on_ranks
from support.synthetic import SHAPES
from torch_powersgd import _C

# Every source, the highest first, gives one field more than the one above it. A field that no
# source gives has its default.
SOURCES: dict[str, dict[str, Any]] = {
    "attach": {"matrix_approximation_rank": 2},
    "pg_options": {"matrix_approximation_rank": 3, "min_compression_rate": 1.3},
    "configure": {"matrix_approximation_rank": 4, "min_compression_rate": 1.4, "random_seed": 4},
    "environment": {
        "matrix_approximation_rank": 5,
        "min_compression_rate": 1.5,
        "random_seed": 5,
        "start_powerSGD_iter": 5,
    },
}


# The sources that are given, the one that gives complete Options instead of a mapping, and the
# sources that then apply, the lowest first.
ORDERS = [
    (["environment"], "", ["environment"]),
    (["configure", "environment"], "", ["configure"]),
    (["pg_options", "environment"], "", ["environment", "pg_options"]),
    (["attach", "pg_options", "configure"], "", ["configure", "pg_options", "attach"]),
    (["attach", "pg_options", "environment"], "attach", ["attach"]),
    (["attach", "pg_options", "environment"], "pg_options", ["pg_options", "attach"]),
]


@pytest.mark.parametrize(("given", "complete", "apply"), ORDERS)
@on_ranks(backend=None)
def test_the_order_of_the_sources(
    rank: int, given: list[str], complete: str, apply: list[str]
) -> None:
    if "environment" in given:
        for name, value in SOURCES["environment"].items():
            os.environ[f"POWERSGD_{name.upper()}"] = str(value)
    if "configure" in given:
        tp.configure(tp.Options(**SOURCES["configure"]))
    options: dict[str, Any] = {source: SOURCES[source] for source in given}
    if complete:
        options[complete] = tp.Options(**SOURCES[complete])
    ranks.init_group("cpu:powersgd", options.get("pg_options"))
    expected: dict[str, Any] = {}
    for source in apply:
        expected |= SOURCES[source]
    assert tp.attach(make_ddp(SHAPES), options.get("attach")).options == tp.Options(**expected)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("matrix_approximation_rank", (2, 2, 3)),
        ("scope", ("attached", "never", "attached")),
        ("residual_dtype", (torch.float32, torch.bfloat16, torch.float32)),
    ],
)
def test_ranks_that_disagree_all_get_the_same_error(
    field: str, values: tuple[Any, Any, Any]
) -> None:
    message = _one_error([{field: value} for value in values])
    other = next(rank for rank in range(3) if values[rank] != values[0])
    texts = [str(values[rank]).removeprefix("torch.") for rank in (0, other)]
    assert all(part in message for part in (field, f"rank {other}", "rank 0", *texts))


def test_ranks_with_other_kernels_all_get_an_error_before_their_options() -> None:
    options = [{"random_seed": 0}, {"random_seed": 0}, {"random_seed": 1}]
    message = _one_error(options, ["1.0", "1.0", "2.0"])
    for part in (
        "kernels",
        "rank 0 has '1.0'",
        "rank 2 has '2.0'",
        "one version of torch_powersgd",
    ):
        assert part in message
    assert "random_seed" not in message


@pytest.mark.parametrize(
    "bad",
    [{"scope": "some"}, {"rank": 4}, {"matrix_approximation_rank": object()}, 3],
    ids=["value", "name", "type", "mapping"],
)
def test_invalid_options_on_one_rank_are_an_error_on_every_rank(bad: int | dict[str, Any]) -> None:
    assert "rank 1" in _one_error([None, bad, None])


def _one_error(options: list[Any], versions: list[str] | None = None) -> str:
    """The error of starting a group with each rank's options, which is the same on all ranks."""
    messages = ranks.run(3, _error_of_init, options, versions, backend=None)
    assert len(set(messages)) == 1
    message: str = messages[0]
    return message


def _error_of_init(rank: int, options: list[Any], versions: list[str] | None) -> str:
    if versions:
        _C.kernels_version = versions[rank]
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the caller compares the message
        ranks.init_group("cpu:powersgd", options[rank])
    return str(raised.value)
