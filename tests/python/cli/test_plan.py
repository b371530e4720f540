# SPDX-License-Identifier: BSD-3-Clause
"""powersgd plan: which parameters are compressed, and how far."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import command_line
from torch_powersgd.cli.plan import wrapped

MODULE = """
import torch

def model():
    return torch.nn.Sequential(
        torch.nn.Conv2d(16, 32, 3), torch.nn.Flatten(), torch.nn.Linear(128, 1000, bias=False)
    )

def layers():
    blocks = [torch.nn.Linear(64 + 8 * (i % 2), 64) for i in range(12)]
    model = torch.nn.Module()
    model.trunk = torch.nn.ModuleList(blocks)
    model.trunk.register_parameter("scale", torch.nn.Parameter(torch.ones(7)))
    model.trunk[11].weight.requires_grad_(False)
    return model

def in_float64():
    return torch.nn.Linear(99, 99).double()

def biases():
    return torch.nn.LayerNorm(8)

def frozen():
    return model().requires_grad_(False)

def nothing():
    return None

def broken():
    return model().no_such_layer

def exits():
    raise SystemExit(0)

def lazy():
    return torch.nn.LazyLinear(8)

def with_an_empty_one():
    model = torch.nn.Linear(99, 99)
    model.empty = torch.nn.Parameter(torch.empty(0, 8))
    return model

def wide():
    return torch.nn.Linear(20_000, 20_000, device="meta")

constant = 3

def of_width(width):
    return torch.nn.Linear(width, width)
"""

# Rank 4 sends 1000 x 128 and 32 x 144 as factors, the bias raw, two uses and a count.
TOTAL = 128_000 + 4608 + 32
P_NUMEL, Q_NUMEL, TAIL = 4 * (1000 + 32), 4 * (128 + 144), 32 + 2 + 1
MODEL, LAYERS = "models_of_test:model", "models_of_test:layers"


Plan = Callable[..., str]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plan]:
    """Runs the command for one of the models; returns its output."""
    (tmp_path / "models_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str, ends_with: int = 0) -> str:
        status, said = command_line.run("plan", *arguments)
        assert status == ends_with
        return said

    yield run
    sys.modules.pop("models_of_test", None)


def _rows(table: str) -> dict[str, list[str]]:
    """The cells of each row by its first cell."""
    rows = [re.split("  +", line.strip()) for line in table.splitlines()]
    return {row[0]: row[1:] for row in rows if len(row) > 3}


def test_prints_the_plan(plan: Plan) -> None:
    printed = plan(MODEL, "--rank", "4", "--wire-dtype", "none")
    sent = 4 * (P_NUMEL + Q_NUMEL + TAIL)
    rows = _rows(printed)
    assert rows["2.weight"] == ["1000 x 128", "4", "512 kB", "18.0 kB", "28.4"]
    assert rows["0.weight"] == ["32 x 16 x 3 x 3", "4", "18.4 kB", "2.82 kB", "6.5"]
    assert rows["0.bias"] == ["32", "raw", "128 B", "128 B", "1.0"]
    ratio = f"{4 * TOTAL / sent:.1f}"
    assert rows["all"] == [f"{4 * TOTAL / 1e3:.0f} kB", f"{sent / 1e3:.1f} kB", ratio]
    assert len(rows) == 5, "with the headings"
    text = " ".join(printed.split())
    share = 100 * (TOTAL - 32) / TOTAL
    assert f"2 of 3 parameters ({share:.1f} % of {TOTAL:,} elements) are compressed" in text
    assert "at matrix rank 4 with factors in float32." in text
    assert f"sends {sent / 1e3:.1f} kB per process instead of 531 kB: {ratio} times less" in text
    payloads = 3 * (P_NUMEL + Q_NUMEL + TAIL)  # with those that two processes send each other
    residual, factors = 4 * (TOTAL - 32), 4 * (P_NUMEL + 2 * Q_NUMEL + payloads)
    assert f"{residual / 1e3:.0f} kB for the residual, {factors / 1e3:.1f} kB for factors" in text
    found = re.search(r"needs (\d+) kB more memory .* buffers, ([\d.]+) kB for the kernels", text)
    assert found is not None
    assert float(found[1]) == pytest.approx((residual + factors) / 1e3 + float(found[2]), abs=1)


def test_the_wire(plan: Plan) -> None:
    rows = _rows(plan(MODEL, "--rank", "4", "--wire-dtype", "bfloat16"))
    # Packets have groups of 64 elements. Vectors of 1000, 128, 32 and 144 have 16, 2, 1 and 3.
    assert rows["2.weight"][3] == f"{2 * 64 * 4 * (16 + 2) / 1e3:.2f} kB"
    assert rows["0.bias"][3] == "128 B"
    # The bias is sent in float32, and the counts have 3 bytes. A packet is a multiple of 64 bytes.
    p, q = 2 * 64 * 4 * (16 + 1) + 128 + 3, 2 * 64 * 4 * (2 + 3)
    assert rows["all"][1] == f"{(64 * math.ceil(p / 64) + q) / 1e3:.1f} kB"


def test_layers_of_one_kind_share_a_row(plan: Plan) -> None:
    printed = plan(LAYERS, "--rank", "4")
    assert "All names begin with trunk." in printed
    assert "Parameters without a gradient, which are left out: 1." in printed
    rows = _rows(printed)
    assert rows["*.weight (6)"][0] == "64 x 64"
    assert rows["*.bias (12)"][:3] == ["64", "raw", "3.07 kB"]
    assert rows["scale"][0] == "7"
    assert sum("64 x 72" in line for line in printed.splitlines()) == 1
    assert not [name for name in rows if "others" in name]


def test_the_largest_and_all_others(plan: Plan) -> None:
    rows = _rows(plan(LAYERS, "--rank", "4", "--top", "1"))
    assert rows["18 others"][0] == "13 raw"
    gradient = 4 * (6 * 64 * 64 + 5 * 64 * 72 + 12 * 64 + 7)
    assert rows["all"][0] == f"{gradient / 1e3:.0f} kB"


def test_every_parameter(plan: Plan) -> None:
    rows = _rows(plan(LAYERS, "--rank", "4", "--all"))
    assert all(rows[f"{i}.weight"][1] == "4" for i in range(11))
    assert "11.weight" not in rows
    assert rows["11.bias"][1] == "raw"


@pytest.mark.parametrize(
    ("hosts", "payloads", "ring"),
    [((2, 4), 1.0, 7 / 4), ((4, 4), 1.5, 15 / 8), ((2, 1), 1.0, 1), ((4, 1), 1.5, 3 / 2)],
)
def test_a_host_sends_the_sum_of_its_processes(
    plan: Plan, hosts: tuple[int, int], payloads: float, ring: float
) -> None:
    given = f"--rank 8 --hosts {hosts[0]} --per-host {hosts[1]}".split()
    sizes = {"kB": 1e3, "MB": 1e6, "GB": 1e9}

    def sent(*arguments: str) -> list[float]:
        said = " ".join(plan("models_of_test:wide", *arguments).split())
        found = re.search(r"sends ([\d.]+) (.B)[a-z ]* instead of ([\d.]+) (.B): ", said)
        assert found, said
        assert (f"each of {hosts[0]} hosts of {hosts[1]} processes sends" in said) == (
            hosts[1] > 1 and len(arguments) > 2
        )
        return [float(found[i]) * sizes[found[i + 1]] for i in (1, 3)]

    payload, gradient = sent("--rank", "8")
    host, plain = sent(*given)
    assert host == pytest.approx(payloads * payload, rel=0.02)
    assert plain == pytest.approx(ring * gradient, rel=0.01)


def test_what_compresses_nothing(plan: Plan) -> None:
    printed = " ".join(plan(MODEL, "--rank", "600").split())
    assert "Nothing is compressed at matrix rank 600" in printed
    assert "each step sends 531 kB per process" in printed
    highest = int(re.findall(r"highest matrix rank that compresses .* is (\d+)", printed)[0])
    assert "Nothing is compressed" not in plan(MODEL, "--rank", str(highest))
    assert "Nothing is compressed" in plan(MODEL, "--rank", str(highest + 1))
    printed = " ".join(plan("models_of_test:in_float64").split())
    assert "no weight that any matrix rank compresses" in printed
    assert "Parameters in float64 are averaged exactly." in printed
    printed = " ".join(plan("models_of_test:biases").split())
    assert "no weight that any matrix rank compresses" in printed


def test_matrix_ranks_of_single_parameters(plan: Plan) -> None:
    rows = _rows(plan(MODEL, "--rank", "4", "--matrix-ranks", "0.weight=0,*.weight=2"))
    assert rows["0.weight"][1] == "raw"
    assert rows["2.weight"][1] == "2"


def test_a_round_of_local_steps_with_a_density(plan: Plan) -> None:
    """97,657 blocks of 328 bytes, and five for the bias.

    Factors: 4.25 bits each, with scales, for 40,000 x 32 numbers, and 80 kB for the bias.
    """
    said = " ".join(plan("models_of_test:wide", "--density", "1/16").split())
    assert "sends 32.0 MB to each other process with density=0.0625, and 761 kB with" in said


def test_the_least_compression_rate(plan: Plan) -> None:
    rows = _rows(plan(MODEL, "--rank", "4", "--min-compression-rate", "10"))
    assert rows["0.weight"][1] == "raw"
    assert rows["2.weight"][1] == "4"


def test_nothing_is_cut_off_on_a_narrow_terminal(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in ("60", "30"):
        monkeypatch.setenv("COLUMNS", columns)
        printed = plan(LAYERS, "--rank", "4")
        assert max(map(len, printed.splitlines())) <= 60
        assert "…" not in printed


def test_an_empty_parameter_has_the_ratio_of_what_is_not_compressed(plan: Plan) -> None:
    assert _rows(plan("models_of_test:with_an_empty_one"))["empty"][-1] == "1.0"


@pytest.mark.parametrize("width", [5, 9, 14, 60])
def test_a_long_name_goes_on_below(width: int) -> None:
    name = "transformer.h.0.attn.weight (12)"
    lines = wrapped(name, width).split("\n")
    assert "".join(lines) == name
    assert max(map(len, lines)) <= width
    if width == 14:
        assert lines == ["transformer.h", ".0.attn", ".weight (12)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["models_of_test"], "MODULE:FACTORY.*'models_of_test'"),
        (["models_of_test:"], "MODULE:FACTORY"),
        ([":model"], "MODULE:FACTORY"),
        (["no_such_module:model"], "no_such_module"),
        (["models_of_test:no_such_factory"], "no_such_factory"),
        (["models_of_test:nothing"], "torch.nn.Module, got NoneType"),
        (["models_of_test:constant"], "constant.*int"),
        (
            ["models_of_test:of_width"],
            r"must be of the form 'def make_model\(\).*of_width\(width\)",
        ),
        (["models_of_test:lazy"], "models_of_test:lazy must call its model once"),
        (["models_of_test:frozen"], "no parameter that requires a gradient"),
        ([MODEL, "--wire-dtype", "int2"], "wire-dtype.*'int2'.*bfloat16"),
        ([MODEL, "--top", "0"], "--top.*an integer >= 1"),
        ([MODEL, "--top", "3", "--all"], "not allowed with"),
        ([MODEL, "--rank", "0"], "matrix_approximation_rank.*got 0"),
        ([MODEL, "--rank", "four"], "four"),
        ([MODEL, "--matrix-ranks", "weight"], "--matrix-ranks must be of the form.*'weight'"),
        ([MODEL, "--matrix-ranks", "9.bias=0"], "matrix_ranks: no trainable.*'9.bias'.*2.weight"),
        ([MODEL, "--density", "1/0"], "--density.*such as 1/16, got 1/0"),
        ([MODEL, "--density", "2"], "density must be a number <= 1 such as 1/16, or None, got 2"),
        ([MODEL, "--min-compression-rate", "nan"], "min_compression_rate"),
        ([], "MODULE:FACTORY"),
    ],
)
def test_a_wrong_argument_is_a_usage_error(plan: Plan, arguments: list[str], message: str) -> None:
    said = plan(*arguments, ends_with=2)
    assert said.startswith("usage: powersgd ")
    assert re.search(message, said, re.DOTALL)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("models_of_test:broken", "AttributeError: 'Sequential' object has no attribute"),
        ("models_of_test:exits", "SystemExit: 0"),
        ("imports_too_much:model", "ModuleNotFoundError: No module named 'no_such_library'"),
    ],
)
def test_an_error_in_the_users_code_shows_its_line(plan: Plan, path: str, error: str) -> None:
    Path("imports_too_much.py").write_text("import no_such_library")
    said = plan(path, ends_with=2)
    assert f"error: {path} failed with {error}" in said
    assert f'{path.split(":")[0]}.py", line ' in said
