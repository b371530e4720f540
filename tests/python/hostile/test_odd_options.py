# SPDX-License-Identifier: BSD-3-Clause
"""Options of any type from any source: what is accepted is exact, and the rest gets one error."""

from __future__ import annotations

import dataclasses
import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_powersgd as tp
from support.state_damage import Unprintable
from torch_powersgd.options import lay_over, resolve

# Examples are the same in each run, so that a test only fails because of a change.
FIXED = settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=100,
    suppress_health_check=list(HealthCheck),
)
FIELDS = {field.name: str(field.type) for field in dataclasses.fields(tp.Options)}
LONGEST = 900  # characters of a message, which may list all fields


class Converts:
    """A value whose conversions to numbers raise."""

    def __float__(self) -> float:
        raise RuntimeError("this is not a number")

    def __index__(self) -> int:
        raise RuntimeError("this is not a number")


ODD: list[Callable[[], Any]] = [
    Unprintable,
    Converts,
    lambda: 10**5000,
    lambda: -(10**400),
    lambda: "x" * 10**6,
    lambda: "\ud800",
    lambda: torch.tensor(1.5),
    lambda: torch.tensor([1, 2]),
    lambda: torch.tensor(1j),
    lambda: torch.tensor(True),
    lambda: torch.empty(2, device="meta"),
    lambda: np.array([1, 2]),
    lambda: np.array(1.5),
    lambda: np.array(["a"]),
    lambda: np.bool_(True),
    lambda: np.float32(0.5),
    lambda: np.int64(3),
    lambda: decimal.Decimal("0.5"),
    lambda: fractions.Fraction(1, 3),
    lambda: bytearray(b"1.5"),
    lambda: torch.device("cpu"),
    lambda: torch.qint8,
    object,
    dict,
    lambda: int,
]
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(), max_size=20),
    st.text(st.characters(categories=["Cs"]), min_size=1, max_size=3),
    st.binary(max_size=8),
    st.lists(st.integers(), max_size=3),
    st.sampled_from(ODD).map(lambda make: make()),
    st.sampled_from(
        ["int8", "bfloat16", "torch.float16", "INT8", "always", "gloo", "nan", "1e999"]
    ),
)


def message_of(call: Callable[[], Any]) -> str:
    """The message of a call's ValueError, or nothing. Any other error fails the test."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def check_field(name: str, value: Any) -> None:
    made: list[tp.Options] = []
    fields = {name: value}
    message = message_of(lambda: made.append(tp.Options(**fields)))
    if not message:
        held = getattr(made[0], name)
        if FIELDS[name] in ("int", "float"):
            assert math.isfinite(held)
            assert held == float(value)
        elif FIELDS[name].startswith("Mapping"):
            assert held == tuple(dict(value).items())
        else:
            assert str(held).removeprefix("torch.") == str(value).removeprefix("torch.")
        return
    assert name in message
    assert "must be" in message
    assert len(message) < LONGEST, "the message is cut"
    for source in (
        lambda: resolve(fields),
        lambda: lay_over(tp.Options.hook_defaults(), fields, "here"),
    ):
        assert message_of(source).endswith(message)


@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.long)])
def test_a_field_of_any_value(count: int) -> None:
    check = given(st.sampled_from([*FIELDS]), ANYTHING)(check_field)
    settings(FIXED, max_examples=count)(check)()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_an_odd_value(name: str) -> None:
    for make in ODD:
        check_field(name, make())


@FIXED
@given(name=st.one_of(ANYTHING.filter(lambda value: getattr(value, "__hash__", None)), st.text()))
def test_a_name_of_any_type(name: Any) -> None:
    try:
        hash(name)
    except Exception:
        return
    if isinstance(name, str) and name in FIELDS:
        return
    message = message_of(lambda: resolve({name: 1}))
    assert message.startswith("pg_options: ")
    assert "is not an option" in message
    assert len(message) < LONGEST


@FIXED
@given(value=ANYTHING)
def test_options_of_any_type(value: Any) -> None:
    if value is None or (isinstance(value, dict) and not value):
        return
    assert "must be torch_powersgd.Options" in message_of(lambda: resolve(value))
    assert "configure must be torch_powersgd.Options" in message_of(lambda: tp.configure(value))
    assert "state must be a PowerSGDState" in message_of(lambda: tp.Options.from_hook_state(value))


# An environment variable holds no null character, and its bytes may be no UTF-8.
TEXTS = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20),
    st.binary(max_size=8)
    .filter(lambda data: b"\0" not in data)
    .map(lambda b: b.decode("utf-8", "surrogateescape")),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["9" * 5000, "0x10", "1_000", " 7 ", "\u0663", "true", "None", "int4"]),
)


@FIXED
@given(name=st.sampled_from([*FIELDS]), text=TEXTS)
def test_an_environment_variable_of_any_text(name: str, text: str) -> None:
    variable = f"POWERSGD_{name.upper()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, text)
        message = message_of(lambda: resolve(None))
    assert not message or (variable in message and "must be" in message and len(message) < LONGEST)


@FIXED
@given(value=ANYTHING)
def test_a_scope_of_any_value(value: Any) -> None:
    def block() -> None:
        with tp.scope(value):
            pass

    message = message_of(block)
    allowed = isinstance(value, str) and value in ("always", "never")
    assert allowed == (not message)
    assert allowed or message.startswith("scope must be 'always' or 'never', got")


@FIXED
@given(value=ANYTHING.filter(lambda value: value is not None))
def test_a_group_of_any_value(value: Any) -> None:
    tensors = {"w": torch.ones(3)}
    for function in (tp.stats, lambda group: tp.attach(tensors, group=group)):
        message = message_of(lambda f=function: f(value))  # type: ignore[misc]
        assert message.startswith("group must be a process group that this ")
