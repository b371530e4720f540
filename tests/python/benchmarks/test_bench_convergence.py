# SPDX-License-Identifier: BSD-3-Clause
"""The examples train, and benchmarks/bench_convergence.py and bench_noniid.py measure them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_powersgd as tp
from support.repository import ROOT
from support.torchrun import torchrun

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

from cluster import contenders, methods
from convergence import matrix, pictures, report, tables, tasks

OURS = "ours, attached"
HOOK = "torch's PowerSGD hook, one bucket"


def _measure(program: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    output, picture = folder / "result.json", folder / "picture.png"
    script = [sys.executable, str(ROOT / "benchmarks" / program), "--quick"]
    files = ["--json", str(output), "--picture", str(picture)]
    subprocess.run([*script, *files, *options], check=True, timeout=400)
    assert picture.stat().st_size > 0
    runs: list[dict[str, Any]] = json.loads(output.read_text())["runs"]
    return runs


def test_every_method_learns_every_task(tmp_path: Path) -> None:
    runs = _measure("bench_convergence.py", tmp_path)
    by_name = {(run["task"], run["method"]): run for run in runs}
    methods = (
        "plain all-reduce",
        "torch's bf16 hook",
        f"{HOOK}, rank 1",
        f"{OURS}, rank 1",
        "ours, bf16 wire, rank 16",
        "ours, int8 wire, rank 4",
    )
    names = ("language", "digits", "lstm")
    assert set(by_name) == {(task, method) for task in names for method in methods}
    for run in runs:
        assert run["validation_loss"][-1] < run["validation_loss"][0], run
    for task in names:
        plain, bf16, _, ours, _, int8 = (by_name[task, method] for method in methods)
        # Each of two ranks sends the whole payload, and Gloo's headers: 64 bytes for each of some
        # tens of segments.
        size = plain["gradient_bytes"]
        assert size <= plain["bytes_sent_per_step"] < size + 10_000
        assert size / 2 <= bf16["bytes_sent_per_step"] < size / 2 + 10_000
        assert ours["bytes_sent_per_step"] < size / 6
        # Four columns of one byte are as long as one column of float32. The raw segments are half
        # as long, and there is a scale for each column.
        assert int8["bytes_sent_per_step"] < ours["bytes_sent_per_step"] + 5_000


@pytest.mark.long
def test_every_variant_learns(tmp_path: Path) -> None:
    names = [name for name in tasks.TASKS if name not in matrix.MODELS]
    options = ("--tasks", *names, "--methods", "plain")
    runs = _measure("bench_convergence.py", tmp_path, *options)
    assert [run["task"] for run in runs] == names
    for run in runs:
        assert run["validation_loss"][-1] < run["validation_loss"][0], run


def test_the_matrix_has_what_each_figure_needs() -> None:
    seeds = 3
    stages = matrix.STAGES.values()
    runs = matrix.runs(stages, seeds)
    assert len(set(runs)) == len(runs)
    plain = contenders.Contender("plain", None)
    for task in tasks.TASKS:
        # Each loss is compared with plain's of the same seed.
        seeds_of = {run.contender: set[int]() for run in runs if run.task == task}
        for run in runs:
            if run.task == task:
                seeds_of[run.contender].add(run.seed)
        assert plain in seeds_of
        assert all(each == set(range(seeds)) for each in seeds_of.values())
    # The first stage has the recommended setting on each model, and all of its first seed first.
    front = list(matrix.STAGES["front"].runs(seeds))
    assert runs[: len(front)] == front
    assert {run.task for run in front} == set(matrix.MODELS)
    assert contenders.Contender("int8-wire", 16) in {run.contender for run in front}
    assert [run.seed for run in front] == sorted(run.seed for run in front)


def test_a_method_takes_options() -> None:
    (wanted,) = contenders.expand([contenders.parse("int8-wire+warm_start_noise=0.2:4")], ())
    assert wanted.title == "ours, int8 wire, warm start noise 0.2, rank 4"
    assert wanted.name == "int8-wire+warm_start_noise=0.2:4"
    assert wanted.how.options is not None
    options = wanted.how.options(4, 7)
    assert (options.wire_dtype, options.warm_start_noise) == ("int8", 0.2)
    assert (options.matrix_approximation_rank, options.random_seed) == (4, 7)
    assert options.start_powerSGD_iter == methods.EXACT_STEPS
    later = methods.find("int8-wire+start_powerSGD_iter=30").options
    assert later is not None
    assert later(4, 7).start_powerSGD_iter == 30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain+rank=4", "plain has no options"),
        ("int8-wire+warm_start_noise", "a field of Options, got 'warm_start_noise'"),
        ("int8-wire+noise=0.1", "a field of Options, got 'noise=0.1'"),
    ],
)
def test_a_bad_option_of_a_method_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.find(name)


def _record() -> dict[str, Any]:
    """A record of three seeds, whose plain losses are 1, 2 and 3."""
    beyond = {
        "plain": (0.0, 0.0, 0.0),
        "hook-1-bucket:4": (0.1, 0.2, 0.3),
        "int8-wire:16": (-0.01, 0.03, 0.005),
        "int8-wire:8": (0.0, 0.01, 0.005),
        "int8-wire+warm_start_noise=0.2:8": (0.0, 0.0, 0.02),
    }
    sent = dict(zip(beyond, (1000, 50, 20, 10, 10), strict=True))
    runs = []
    for text, gaps in beyond.items():
        (contender,) = contenders.expand([contenders.parse(text)], ())
        about = {"task": "lstm", "name": text, "method": contender.title, "rank": contender.rank}
        for seed, gap in enumerate(gaps):
            losses = {"validation_loss": [9.0, 1.0 + seed + gap], "step": [0, 300]}
            sizes = {"bytes_sent_per_step": sent[text], "gradient_bytes": 1000, "parameters": 250}
            runs.append({**about, "seed": seed, **losses, **sizes})
    return {"tasks": {"lstm": tasks.TASKS["lstm"].about}, "runs": runs, "world": 2}


def test_a_verdict_says_what_is_as_good_as_plain() -> None:
    by_title = report.by_method(_record(), "lstm")
    plain = next(iter(by_title.values()))
    verdicts = {
        runs[0]["name"]: report.verdict(report.beyond_plain(runs, plain))
        for runs in by_title.values()
    }
    assert list(verdicts.items()) == [
        ("plain", "yes, every seed"),
        ("hook-1-bucket:4", "no"),
        ("int8-wire:8", "yes, every seed"),
        ("int8-wire:16", "yes"),
        ("int8-wire+warm_start_noise=0.2:8", "yes"),
    ]


def test_the_tables_have_the_losses_above_plain_and_the_bytes() -> None:
    record = _record()
    assert tables.front(record, "lstm") == (
        ["", "lstm"],
        [
            ["plain's loss", "2.000 (1.000..3.000)"],
            ["torch's PowerSGD hook, one bucket, rank 4", "+0.200 (+0.100..+0.300), 20 x"],
            ["ours, int8 wire, rank 8", "+0.005 (+0.000..+0.010), 100 x"],
            ["ours, int8 wire, rank 16", "+0.008 (-0.010..+0.030), 50 x"],
        ],
    )
    assert tables.curve(record, "lstm") == (
        ["lstm: rank", "torch's hook", "float32", "bfloat16", "int8", "int4"],
        [
            ["4", "+0.200, 20 x", "", "", "", ""],
            ["8", "", "", "", "+0.005, 100 x", ""],
            ["16", "", "", "", "+0.008, 50 x", ""],
        ],
    )
    del record["runs"][-1]  # the noisy run of the last seed
    noisy = ["+0.005 (+0.000..+0.010)", "+0.000 (+0.000..+0.000), 2 seeds"]
    headings, rows = tables.noise(record, "int8-wire")
    assert headings == ["", "rank", "no noise", "noise 0.2"]
    assert rows == [["lstm", "8", *noisy]]


def test_the_picture_is_written(tmp_path: Path) -> None:
    pictures.draw(_record(), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_a_measurement_resumes_with_other_methods(tmp_path: Path) -> None:
    """The file's runs stay as they are, and a file of another task's arguments is refused."""
    options = ("--tasks", "digits", "--resume", "--methods")
    first = _measure("bench_convergence.py", tmp_path, *options, "plain", "bf16-wire:2")
    runs = _measure("bench_convergence.py", tmp_path, *options, "bf16-wire", "--ranks", "2", "4")
    assert runs[: len(first)] == first
    titles = ["plain all-reduce", "ours, bf16 wire, rank 2", "ours, bf16 wire, rank 4"]
    assert [run["method"] for run in runs] == titles
    assert [run["name"] for run in runs] == ["plain", "bf16-wire:2", "bf16-wire:4"]
    assert all(run["seconds"] > 0 for run in runs)
    assert [run["rank"] for run in runs] == [None, 2, 4]

    script = [sys.executable, str(ROOT / "benchmarks" / "bench_convergence.py")]
    shown = subprocess.run(
        [*script, "--show", str(tmp_path / "result.json")],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout
    for title in titles:
        assert title in shown
    left = subprocess.run(
        [*script, "--quick", *options[:-1], "--left", "--methods", "plain", "bf16-wire:8"]
        + ["--json", str(tmp_path / "result.json")],
        check=True,
        capture_output=True,
        text=True,
        timeout=100,
    ).stdout
    assert left.startswith("digits: 1 runs, ")

    record = json.loads((tmp_path / "result.json").read_text())
    record["tasks"]["digits"]["arguments"] = "--steps 1000000"
    (tmp_path / "other.json").write_text(json.dumps(record))
    refused = subprocess.run(
        [*script, *options, "plain", "--quick", "--json", str(tmp_path / "other.json")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert refused.returncode == 1
    assert "has other settings: digits is" in refused.stderr


def test_unlike_data_keep_our_residual_bounded(tmp_path: Path) -> None:
    runs = _measure("bench_noniid.py", tmp_path)
    by_name = {(run["method"], run["dtype"]): run for run in runs}
    methods, dtypes = ("plain", "hook-1-bucket", "attached"), ("float32", "bfloat16")
    assert set(by_name) == {(method, dtype) for method in methods for dtype in dtypes}
    for dtype in dtypes:
        run = by_name["attached", dtype]
        # Rank 2 serves 2 of 16 dimensions a step. Twice the 8 steps of a turn is the bound, as in
        # test_identity.py.
        assert 0 < max(ratio for ratio in run["ratio"] if ratio is not None) < 2 * 16 / 2
        assert run["distance"][-1] < run["distance"][0] / 2


@pytest.mark.parametrize("example", ["train_lm", "train_digits"])
def test_an_example_has_the_default_options(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    arguments = importlib.import_module(example).options().parse_args([])
    defaults = tp.Options()
    assert arguments.rank == defaults.matrix_approximation_rank
    assert tp.Options(wire_dtype=arguments.wire_dtype).wire_dtype == defaults.wire_dtype
    assert arguments.exact_steps < arguments.steps / 20


def test_the_digits_example_saves_and_resumes(tmp_path: Path) -> None:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint.pt"
    script = [ROOT / "examples" / "train_digits.py", "--channels", 32, "--exact-steps", 3]
    files = ["--metrics", metrics, "--checkpoint", checkpoint]
    for steps in (5, 8):
        result = torchrun(*script, *files, "--steps", steps)
        assert "validation accuracy" in result.stdout
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 9))
    sent = [record["bytes_sent"] for record in records]
    by_step = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    # A resumed run goes on from its step: the exact steps are the first three of all.
    assert by_step[:3] == [by_step[0]] * 3
    assert by_step[3:] == [by_step[3]] * 5
    assert 0 < by_step[3] < by_step[0] / 8
