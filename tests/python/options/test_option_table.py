# SPDX-License-Identifier: BSD-3-Clause
"""Every place that lists the options has the same: see include/powersgd/core/option_table.h."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import command_line
from support.repository import ROOT
from torch_powersgd._core import _C
from torch_powersgd.options import from_core, to_core, to_plain

FIELDS = {field.name: field for field in dataclasses.fields(tp.Options)}

# The flags of the command line that set an option, by command.
FLAGS = {
    "matrix_approximation_rank": {"plan": "--rank", "advise": "--ranks"},
    "min_compression_rate": {"plan": "--min-compression-rate", "advise": "--min-compression-rate"},
    "wire_dtype": {"plan": "--wire-dtype", "advise": "--wire-dtype"},
}


def _changed(name: str) -> Any:
    """An allowed value of a field that is not its default."""
    default = FIELDS[name].default
    if isinstance(default, bool):
        return not default
    if isinstance(default, (int, float)):
        return default + (0.25 if FIELDS[name].type == "float" else 1)
    texts = {"scope": "never", "inner": "gloo", "matrix_ranks": (("*.weight", 0),)}
    return texts.get(name, torch.bfloat16)


def test_the_struct_has_the_fields() -> None:
    header = (ROOT / "include/powersgd/core/options.h").read_text()
    body = re.search(r"^struct Options \{\n(.*?)^\};", header, flags=re.MULTILINE | re.DOTALL)
    assert body is not None
    members = re.findall(r"^  [\w:<> ]+ (\w+)(?: = [^;]+)?;", body[1], flags=re.MULTILINE)
    assert members == list(FIELDS)


def test_the_table_has_the_fields() -> None:
    # The bindings define a property for each row of the table.
    assert [n for n, v in vars(_C.Options).items() if isinstance(v, property)] == list(FIELDS)


def test_the_core_has_the_same_defaults() -> None:
    core, ours = _C.Options(), to_plain(tp.Options())
    assert {name: getattr(core, name) for name in FIELDS} == ours
    assert {name: type(getattr(core, name)) for name in FIELDS} == {
        name: type(value) for name, value in ours.items()
    }


@pytest.mark.parametrize("name", FIELDS)
def test_a_value_comes_back_from_the_core(name: str) -> None:
    options = dataclasses.replace(tp.Options(), **{name: _changed(name)})
    assert getattr(options, name) != getattr(tp.Options(), name)
    assert from_core(to_core(options)) == options


def _payload_bytes(options: tp.Options) -> int:
    compressor = _C.BucketCompressor([[96, 64], [16, 12], [7]], to_core(options), torch.float32)
    return compressor.payload_bytes


@pytest.mark.parametrize("name", FIELDS)
def test_the_command_line_has_what_changes_the_payload(name: str) -> None:
    # The 16 x 12 weight is compressed at this rate and rank, and not at higher ones.
    base = tp.Options.hook_defaults(min_compression_rate=3.25, matrix_approximation_rank=2)
    value = base.min_compression_rate + 0.25 if name == "min_compression_rate" else _changed(name)
    fields: dict[str, Any] = {name: 3 if name == "matrix_approximation_rank" else value}
    changed = dataclasses.replace(base, **fields)
    assert (_payload_bytes(changed) != _payload_bytes(base)) == (name in FLAGS)
    for command, flag in FLAGS.get(name, {}).items():
        assert re.search(rf"{flag}\b", command_line.run(command, "--help")[1])
