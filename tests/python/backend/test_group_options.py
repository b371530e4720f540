# SPDX-License-Identifier: BSD-3-Clause
"""The options of a new process group: which source applies, and what ranks that disagree get."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.synthetic import SHAPES, make_ddp
from torch_powersgd import _C
from torch_powersgd.group_backends import find_backends


def _text_of(value: object) -> str:
    return str(value).removeprefix("torch.")


def _error_of_init(rank: int, options: list[Any]) -> str:
    try:
        ranks.init_group("cpu:powersgd", options[rank])
    except ValueError as error:
        return str(error)
    return ""


def _options_of_group(
    rank: int, environment: dict[str, str], configured: tp.Options | None, given: Any
) -> tuple[int, str, str]:
    os.environ.update(environment)
    tp.configure(configured)
    ranks.init_group("cpu:powersgd", given)
    core = find_backends(None)[0].options.compression
    dist.all_reduce(torch.ones(3))
    return core.matrix_approximation_rank, core.scope, core.residual_dtype


RANK_2 = {"POWERSGD_MATRIX_APPROXIMATION_RANK": "2"}


@pytest.mark.parametrize(
    ("environment", "configured", "given", "expected"),
    [
        ({}, None, None, (16, "backward", "float32")),
        (RANK_2, None, None, (2, "backward", "float32")),
        (RANK_2, tp.Options(scope="never"), None, (16, "never", "float32")),
        (RANK_2, tp.Options(scope="never"), {"scope": "always"}, (16, "always", "float32")),
        (RANK_2, None, {"residual_dtype": torch.bfloat16}, (2, "backward", "bfloat16")),
        (RANK_2, None, tp.Options(scope="attached"), (16, "attached", "float32")),
        ({}, None, {"matrix_approximation_rank": np.int64(3)}, (3, "backward", "float32")),
    ],
)
def test_a_group_has_the_options_that_apply(
    environment: dict[str, str],
    configured: tp.Options | None,
    given: dict[str, Any] | tp.Options | None,
    expected: tuple[int, str, str],
) -> None:
    arguments = (environment, configured, given)
    assert ranks.run(2, _options_of_group, *arguments, backend=None) == [expected] * 2


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


def _options_of_model(rank: int, given: dict[str, dict[str, Any]], complete: str) -> tp.Options:
    """The options of an attached model. The source `complete` gives Options, others a mapping."""
    for name, value in given.get("environment", {}).items():
        os.environ[f"POWERSGD_{name.upper()}"] = str(value)
    if "configure" in given:
        tp.configure(tp.Options(**given["configure"]))
    options: dict[str, Any] = {
        source: tp.Options(**given[source]) if source == complete else given.get(source)
        for source in ("pg_options", "attach")
    }
    ranks.init_group("cpu:powersgd", options["pg_options"])
    return tp.attach(make_ddp(SHAPES), options["attach"]).options


@pytest.mark.parametrize(
    ("sources", "complete", "expected"),
    [
        (["environment"], "", SOURCES["environment"]),
        (["configure", "environment"], "", SOURCES["configure"]),
        (
            ["pg_options", "environment"],
            "",
            {**SOURCES["environment"], **SOURCES["pg_options"]},
        ),
        (
            ["attach", "pg_options", "environment"],
            "",
            {**SOURCES["environment"], **SOURCES["pg_options"], **SOURCES["attach"]},
        ),
        (
            ["attach", "pg_options", "configure", "environment"],
            "",
            {**SOURCES["configure"], **SOURCES["pg_options"], **SOURCES["attach"]},
        ),
        (["attach", "pg_options", "environment"], "attach", SOURCES["attach"]),
        (
            ["attach", "pg_options", "environment"],
            "pg_options",
            {**SOURCES["pg_options"], **SOURCES["attach"]},
        ),
    ],
)
def test_the_order_of_the_sources(
    sources: list[str], complete: str, expected: dict[str, Any]
) -> None:
    given = {source: SOURCES[source] for source in sources}
    wanted = tp.Options(**expected)
    assert ranks.run(2, _options_of_model, given, complete, backend=None) == [wanted] * 2


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("matrix_approximation_rank", (2, 2, 3)),
        ("scope", ("always", "never", "always")),
        ("residual_dtype", (torch.float32, torch.bfloat16, torch.float32)),
        ("random_seed", (0, 1, 1)),
        ("inner", ("auto", "auto", "gloo")),
    ],
)
def test_ranks_that_disagree_all_get_the_same_error(
    field: str, values: tuple[Any, Any, Any]
) -> None:
    options = [tp.Options(**{field: value}) for value in values]
    messages = ranks.run(3, _error_of_init, options, backend=None, timeout=30)
    assert len(set(messages)) == 1
    other = next(rank for rank in range(3) if values[rank] != values[0])
    for part in (field, f"rank {other}", "rank 0", *map(_text_of, (values[0], values[other]))):
        assert part in messages[0]


def _error_of_kernels(rank: int, versions: list[str], options: list[Any]) -> str:
    _C.kernels_version = versions[rank]
    return _error_of_init(rank, options)


def test_ranks_with_other_kernels_all_get_an_error_before_their_options() -> None:
    options = [{"random_seed": 0}, {"random_seed": 0}, {"random_seed": 1}]
    versions = ["1.0", "1.0", "2.0"]
    messages = ranks.run(3, _error_of_kernels, versions, options, backend=None, timeout=30)
    assert len(set(messages)) == 1
    for part in ("kernels", "'1.0' on rank 0", "'2.0' on rank 2", "one version of torch_powersgd"):
        assert part in messages[0]
    assert "random_seed" not in messages[0]


@pytest.mark.parametrize(
    "bad",
    [{"scope": "some"}, {"rank": 4}, {"matrix_approximation_rank": object()}, 3],
    ids=["value", "name", "type", "mapping"],
)
def test_invalid_options_on_one_rank_are_an_error_on_every_rank(bad: int | dict[str, Any]) -> None:
    messages = ranks.run(3, _error_of_init, [None, bad, None], backend=None, timeout=30)
    assert len(set(messages)) == 1
    assert "rank 1" in messages[0]
