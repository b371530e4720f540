# SPDX-License-Identifier: BSD-3-Clause
"""Options: their defaults, the values that they refuse, and their sources."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

import torch_powersgd as tp
from torch_powersgd import options
from torch_powersgd.options import resolve, to_plain

FIELDS = {field.name: field for field in dataclasses.fields(tp.Options)}

# Each field has a valid value that is not the default, its text in the environment, and bad values.
# Another type is bad even where C++ would convert it. The options are compared between ranks, and
# printed, as they were given.
VALUES: dict[str, tuple[Any, str, list[Any]]] = {
    "matrix_approximation_rank": (4, "4", [0, -1, 1025, 2**40, 2**70, 1.5, "4", math.nan]),
    "start_powerSGD_iter": (7, "7", [-1, 2**70]),
    "min_compression_rate": (1.5, "1.5", [0, -2.5, math.inf, math.nan, "2", 1j]),
    "use_error_feedback": (False, "FALSE", ["no", 2, 0.5]),
    "warm_start": (False, "0", [None, -1]),
    "orthogonalization_epsilon": (1e-6, "1e-6", [-1e-9, 1.5, math.inf, math.nan]),
    "random_seed": (3, "3", [-1, 2**70]),
    "compression_stats_logging_frequency": (5, "5", [0, -3, 2**70]),
    "scope": ("attached", "attached", ["", "always", "Attached", "some", 3, b"always"]),
    "min_numel": (9, "9", [0, -9, 2**70]),
    "inner": ("gloo", "gloo", ["", b"gloo", "mpi", "powersgd", "glo", "Gloo"]),
    "wire_dtype": (torch.bfloat16, "bfloat16", [torch.float32, torch.int32, "int2", "", b"int8"]),
    "residual_dtype": (torch.bfloat16, "bfloat16", [torch.float64, torch.float16, "int8", 3]),
    "check_every": (50, "50", [-1]),
    "allow_discard": (True, "1", ["on demand", 3]),
    "matrix_ranks": (
        (("*.weight", 0), ("mlp.*", 32)),
        "*.weight=0, mlp.*=32",
        [3, "mlp.*", {"a": -1}, {"a": 1025}, {"a": 1.5}, {3: 1}, {"": 1}, ("a", 1)],
    ),
}
# The fields in which the defaults of torch's hook differ from ours.
HOOKS: dict[str, Any] = {
    "matrix_approximation_rank": 1,
    "start_powerSGD_iter": 1000,
    "wire_dtype": None,
}
# The fields that the hook has as well.
SHARED = [
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate"),
    *("use_error_feedback", "warm_start", "orthogonalization_epsilon"),
    "compression_stats_logging_frequency",
]
BAD = [(name, value) for name, (_, _, bad) in VALUES.items() for value in bad]


def test_every_field_is_covered() -> None:
    assert VALUES.keys() == FIELDS.keys()


def test_the_defaults() -> None:
    ours = tp.Options()
    assert (ours.matrix_approximation_rank, ours.start_powerSGD_iter) == (16, 10)
    assert (ours.wire_dtype, ours.residual_dtype) == ("int8", torch.float32)
    assert (ours.scope, ours.min_numel, ours.inner) == ("backward", 131_072, "auto")
    assert (ours.check_every, ours.allow_discard) == (0, False)
    assert dataclasses.replace(ours, **HOOKS) == tp.Options.hook_defaults()


def test_hook_defaults_are_the_hooks() -> None:
    hook = PowerSGDState(process_group=None)
    ours = tp.Options.hook_defaults()
    assert {name: getattr(ours, name) for name in SHARED} == {
        name: getattr(hook, name) for name in SHARED
    }
    # The hook keeps a generator and not its seed, which is 0 by default.
    expected = np.random.RandomState(ours.random_seed).randint(1_000_000_000)
    assert hook.rng.randint(1_000_000_000) == expected
    on_top = tp.Options.hook_defaults(matrix_approximation_rank=8, min_numel=9)
    assert on_top == dataclasses.replace(ours, matrix_approximation_rank=8, min_numel=9)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_refuses_a_bad_value(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b") as raised:
        tp.Options(**{name: value})
    message = str(raised.value)
    assert str(value).removeprefix("torch.") in message, "names the value"
    assert re.search(r"must be .+", message.split(", got")[0]), "names what is allowed"


@pytest.mark.parametrize(
    ("given", "held"),
    [
        (torch.int8, "int8"),
        ("int8", "int8"),
        ("int4", "int4"),
        ("bfloat16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        (None, None),
    ],
)
def test_a_wire_dtype_has_one_form(given: Any, held: Any) -> None:
    ours = tp.Options(wire_dtype=given)
    assert ours.wire_dtype == held
    assert type(ours.wire_dtype) is type(held)
    assert tp.Options(**json.loads(json.dumps(to_plain(ours)))) == ours


def test_matrix_ranks_keep_their_order() -> None:
    """Because the first pattern that fits counts. JSON and the core give them back as lists."""
    given = {"mlp.*": 32, "*.weight": 0}
    ours = tp.Options(matrix_ranks=given)
    assert ours.matrix_ranks == tuple(given.items())
    assert ours != tp.Options(matrix_ranks=dict(reversed(given.items())))
    assert tp.Options(**json.loads(json.dumps(to_plain(ours)))) == ours


def test_options_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        tp.Options().scope = "never"  # type: ignore[misc]


def test_an_unknown_field_is_an_error() -> None:
    message = "'rank' is not an option[.] Did you mean matrix_approximation_rank[?] Allowed: "
    makers: list[Any] = [tp.Options, tp.Options.hook_defaults]
    for make in makers:
        with pytest.raises(TypeError, match=message):
            make(rank=4)
    with pytest.raises(ValueError, match=message):
        resolve({"rank": 4})


# The sources.


def test_what_is_configured_holds_until_it_is_taken_back() -> None:
    tp.configure(tp.Options(min_numel=3))
    assert resolve(None) == tp.Options(min_numel=3)
    tp.configure(None)
    assert resolve(None) == tp.Options()


@pytest.mark.parametrize("name", FIELDS)
def test_environment_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, text, _ = VALUES[name]
    monkeypatch.setenv(f"POWERSGD_{name.upper()}", text)
    assert resolve(None) == tp.Options(**{name: value})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("matrix_approximation_rank", "0"),
        ("matrix_approximation_rank", "1.5"),
        ("matrix_approximation_rank", ""),
        ("min_compression_rate", "nan"),
        ("min_compression_rate", "two"),
        ("warm_start", "perhaps"),
        ("scope", "everything"),
        ("min_numel", "1e6"),
        ("wire_dtype", "float64"),
        ("residual_dtype", "none"),
        ("matrix_ranks", "mlp.*"),
        ("matrix_ranks", "mlp.*=-1"),
        ("matrix_ranks", "mlp.*=32,"),
    ],
)
def test_bad_environment_variable(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"POWERSGD_{name.upper()}", text)
    with pytest.raises(ValueError, match=f"POWERSGD_{name.upper()}") as raised:
        resolve(None)
    assert text.lower() in str(raised.value).lower(), "names the value"


@pytest.fixture
def _first_look() -> Iterator[None]:
    options._warn_of_unknown_variables.cache_clear()
    yield
    options._warn_of_unknown_variables.cache_clear()


@pytest.mark.usefixtures("_first_look")
def test_an_unknown_variable_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POWERSGD_RANK", "4")
    for known in ("BUILD_CUDA", "COMMIT"):
        monkeypatch.setenv(f"POWERSGD_{known}", "0")
    monkeypatch.setenv("POWERSGD_MIN_NUMEL", "22")
    resolve(None)
    resolve(tp.Options())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "POWERSGD_RANK is not an option and has no effect. " in record.getMessage()
    assert "Did you mean POWERSGD_MATRIX_APPROXIMATION_RANK?" in record.getMessage()
    options._warn_of_unknown_variables.cache_clear()
    monkeypatch.setenv("LOCAL_RANK", "1")
    resolve(None)
    assert caplog.records == [record], "one rank of a machine warns"


def test_from_hook_state() -> None:
    fields: dict[str, Any] = {
        "matrix_approximation_rank": 3,
        "start_powerSGD_iter": 12,
        "min_compression_rate": 1.25,
        "use_error_feedback": False,
        "warm_start": False,
        "orthogonalization_epsilon": 1e-8,
        "compression_stats_logging_frequency": 17,
    }
    assert fields.keys() == set(SHARED)
    state = PowerSGDState(process_group=None, **fields)
    assert tp.Options.from_hook_state(state) == tp.Options(wire_dtype=None, **fields)
    fields |= {"random_seed": 5, "warm_start": True}
    on_top = tp.Options.from_hook_state(state, random_seed=5, warm_start=True)
    assert on_top == tp.Options(wire_dtype=None, **fields)
    assert tp.Options.from_hook_state(PowerSGDState(None)) == tp.Options.hook_defaults()


def test_torchs_own_entry_points_name_no_inner_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.14 lists "mpi" among its entry points, also if its build has no MPI."""
    points = [
        SimpleNamespace(name="mpi", dist=SimpleNamespace(name="torch")),
        SimpleNamespace(name="other", dist=SimpleNamespace(name="somebodys")),
    ]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    assert tp.Options(inner="other").inner == "other"
    with pytest.raises(ValueError, match=r"inner must be one of .*'other'.*, got 'mpi'"):
        tp.Options(inner="mpi")
