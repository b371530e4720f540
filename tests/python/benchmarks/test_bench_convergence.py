# SPDX-License-Identifier: BSD-3-Clause
"""bench_convergence.py: all parts, on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import bench_convergence
from cluster import methods
from cluster.trainees import EXACT_STEPS
from convergence import pictures, tables, tasks


def _measure(folder: Path, part: str, *options: str) -> dict[str, Any]:
    file = folder / "result.json"
    bench_convergence.main([part, "--json", str(file), *options])
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def _train(folder: Path, *options: str) -> dict[str, Any]:
    return _measure(folder, "losses", "--quick", "--seeds", "1", *options)


def _assert_learned(task: dict[str, Any]) -> None:
    for name, method in task["methods"].items():
        (loss,) = method["losses"]
        assert loss < task["untrained"], name


def test_every_method_learns(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    methods = ("plain", "bf16", "hook-1-bucket:1", "attached:1", "bf16-wire:16", "int8-wire:4")
    options = ("--tasks", "digits", "--methods", *methods, "--picture", str(picture))
    (digits,) = _train(tmp_path, *options)["tasks"].values()
    assert picture.stat().st_size > 0
    _assert_learned(digits)
    assert tuple(digits["methods"]) == methods
    plain, bf16, _, ours, _, int8 = (each["bytes_per_step"] for each in digits["methods"].values())
    # Each of two ranks sends the whole payload, and Gloo's headers: 64 bytes for each of some tens
    # of segments.
    size = 4 * digits["parameters"]
    assert size <= plain < size + 10_000
    assert size / 2 <= bf16 < size / 2 + 10_000
    assert ours < size / 6
    # Four columns of one byte are as long as one column of float32. The raw segments are as long,
    # and there is a scale for each column.
    assert int8 < ours + 5_000


@pytest.mark.long
def test_every_model_learns(tmp_path: Path) -> None:
    options = ("--tasks", "language", "lstm", "--methods", "plain", "int8-wire:4")
    record = _train(tmp_path, *options)
    assert list(record["tasks"]) == ["language", "lstm"]
    for task in record["tasks"].values():
        _assert_learned(task)
        plain, int8 = (method["bytes_per_step"] for method in task["methods"].values())
        assert int8 < plain / 6


def test_local_steps_learn(tmp_path: Path) -> None:
    methods = (
        *("post-local-sgd:2", "local-sgd+sync_every=2:4", "diloco+sync_every=2+fragments=2:4"),
        "sparse+sync_every=2+fragments=1",
        "sparse-loco+sync_every=2:128",
    )
    record = _train(tmp_path, "--tasks", "digits", "--methods", "plain", *methods)
    (digits,) = record["tasks"].values()
    _assert_learned(digits)
    plain, *averages = (method["bytes_per_step"] for method in digits["methods"].values())
    theirs, *ours = (plain / sent for sent in averages)
    assert 1.9 < theirs < 2.1
    assert min(ours) > 6


@pytest.mark.long
def test_every_variant_learns(tmp_path: Path) -> None:
    names = [name for name in tasks.TASKS if name not in tasks.MODELS]
    record = _train(tmp_path, "--tasks", *names, "--methods", "plain")
    assert list(record["tasks"]) == names
    for task in record["tasks"].values():
        _assert_learned(task)


def test_the_stages_have_what_each_figure_needs() -> None:
    seeds = 3
    runs = tasks.runs(tasks.STAGES.values(), seeds)
    assert len(set(runs)) == len(runs)
    plain = methods.Contender("plain", None)
    for task in tasks.TASKS:
        # Each loss is compared with plain's of the same seed.
        seeds_of = {run.contender: set[int]() for run in runs if run.task == task}
        for run in runs:
            if run.task == task:
                seeds_of[run.contender].add(run.seed)
        assert plain in seeds_of
        assert all(each == set(range(seeds)) for each in seeds_of.values())
    # The first stage has the recommended setting on each model, and all of its first seed first.
    front = tasks.runs([tasks.STAGES["front"]], seeds)
    assert runs[: len(front)] == front
    assert {run.task for run in front} == set(tasks.MODELS)
    assert methods.Contender("int8-wire", 16) in {run.contender for run in front}
    assert [run.seed for run in front] == sorted(run.seed for run in front)


def test_a_method_takes_settings() -> None:
    (wanted,) = methods.named("int8-wire+min_compression_rate=3:4")
    assert wanted.title == "ours, int8 wire, min compression rate 3, rank 4"
    assert wanted.name == "int8-wire+min_compression_rate=3:4"
    assert wanted.how.options is not None
    options = wanted.how.options(4, 7)
    assert (options.wire_dtype, options.min_compression_rate) == ("int8", 3)
    assert (options.matrix_approximation_rank, options.random_seed) == (4, 7)
    assert options.start_powerSGD_iter == EXACT_STEPS
    later = methods.find("int8-wire+start_powerSGD_iter=30").options
    assert later is not None
    assert later(4, 7).start_powerSGD_iter == 30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plain+rank=4", "plain has no setting 'rank'"),
        ("int8-wire+check_every", "SETTING=VALUE, got 'check_every'"),
        ("int8-wire+noise=0.1", "int8-wire has no setting 'noise'"),
        ("int8-wire+wire_dtype=int5", "wire_dtype"),
        ("local-sgd+steps=3", "local-sgd has no setting 'steps'"),
        ("torchft+sync_every=10", "torchft has no setting 'sync_every'"),
    ],
)
def test_a_bad_setting_of_a_method_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.find(name)


def _record() -> dict[str, Any]:
    """A record of three seeds, whose plain losses are 1, 2 and 3."""
    beyond = {
        "plain": (0.0, 0.0, 0.0),
        "hook-1-bucket:4": (0.1, 0.2, 0.3),
        "int8-wire:16": (-0.01, 0.03, 0.005),
        "int8-wire:8": (0.0, 0.01, 0.005),
        "int8-wire+check_every=3:8": (0.0, 0.0),
    }
    sent = dict(zip(beyond, (1000, 50, 20, 10, 10), strict=True))
    measured = {
        name: {
            "bytes_per_step": sent[name],
            "losses": [1.0 + seed + gap for seed, gap in enumerate(gaps)],
        }
        for name, gaps in beyond.items()
    }
    return {"tasks": {"lstm": {**tasks.TASKS["lstm"].about, "methods": measured}}}


def test_the_tables_have_the_losses_above_plain_and_the_bytes() -> None:
    record = _record()
    plain = ["plain's loss", "2.000 (1.000..3.000)"]
    hook = ["torch's PowerSGD hook, one bucket, rank 4", "+0.200 (+0.100..+0.300), 20 x"]
    rank_8 = ["ours, int8 wire, rank 8", "+0.005 (+0.000..+0.010), 100 x"]
    rank_16 = ["ours, int8 wire, rank 16", "+0.008 (-0.010..+0.030), 50 x"]
    rows = [plain, hook, rank_8, rank_16]
    assert tables.losses(record, "front", "lstm") == (["", "lstm"], rows)
    headings, rows_of_all = tables.all_losses(record, "lstm")
    assert rows_of_all[:4] == rows
    assert rows_of_all[4:] == [
        ["ours, int8 wire, check every 3, rank 8", "+0.000 (+0.000..+0.000), 2 seeds, 100 x"]
    ]
    of_rank_16 = tables.losses(record, "front", "lstm", without=["hook-1-bucket:4", "int8-wire:8"])
    assert of_rank_16 == (["", "lstm"], [plain, rank_16])


def test_a_table_by_task_has_a_column_for_each_method() -> None:
    tasks_of = tasks.STAGES["variants"].tasks
    record = {"tasks": dict.fromkeys(tasks_of, _record()["tasks"]["lstm"])}
    headings = ["", "plain's loss", "ours, int8 wire, rank 8", "ours, int8 wire, rank 16"]
    cells = ["2.000 (1.000..3.000)", "+0.005 (+0.000..+0.010)", "+0.008 (-0.010..+0.030)"]
    rows = [[task, *cells] for task in tasks_of]
    assert tables.losses_by_task(record, "variants", "int8-wire:8,16") == (headings, rows)


def test_the_picture_has_a_line_for_each_method(tmp_path: Path) -> None:
    record = _record()
    lines = pictures._lines(record["tasks"]["lstm"]["methods"])
    assert {name: [told for _, _, told in points] for name, points in lines.items()} == {
        "hook-1-bucket": ["4"],
        "int8-wire": ["8", "16"],
    }
    pictures.draw_losses(record, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 0


def test_a_measurement_resumes_with_other_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's runs stay as they are, and a file of another task's arguments is refused."""
    options = ("--tasks", "digits", "--resume", "--methods")
    first = _train(tmp_path, *options, "plain", "bf16-wire:2")
    again = _train(tmp_path, *options, "bf16-wire:2,4")
    before, after = (record["tasks"]["digits"]["methods"] for record in (first, again))
    assert list(after) == ["plain", "bf16-wire:2", "bf16-wire:4"]
    assert {name: after[name] for name in before} == before
    assert len(again["resumed"]) == 1
    shown = capsys.readouterr().out
    for title in ("plain's loss", "ours, bf16 wire, rank 2", "ours, bf16 wire, rank 4"):
        assert title in shown

    again["tasks"]["digits"]["arguments"] = "--steps 1000000"
    (tmp_path / "result.json").write_text(json.dumps(again))
    with pytest.raises(SystemExit, match="has other settings: digits is --steps 1000000"):
        _train(tmp_path, *options, "plain")


@pytest.mark.long
def test_the_errors_of_shadow_mode_stand_beside_the_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = _measure(tmp_path, "shadow", "--quick", "--seeds", "1", "--steps", "2")
    assert [(run["task"], run["rank"]) for run in record["runs"]] == [
        (task, rank) for task in ("language", "digits", "lstm") for rank in (1, 2, 4, 8, 16, 32)
    ]
    # The tiny models have no weight that rank 32 compresses, and rank 1 leaves most out.
    for run in record["runs"]:
        (error,) = run["errors"]
        assert 0 <= error < {1: 2, 32: 0.01}.get(run["rank"], 2)
        assert run["rank"] > 1 or error > 0.1
    capsys.readouterr()
    bench_convergence.main(["shadow", "--show", str(tmp_path / "result.json")])
    assert f"correlation of the two: {record['spearman']:.3f}" in capsys.readouterr().out


@pytest.mark.long
def test_unlike_data_keep_our_residual_bounded(tmp_path: Path) -> None:
    record = _measure(tmp_path, "unlike-data", "--steps", "200")
    assert [(run["method"], run["dtype"]) for run in record["runs"]] == [
        (method, dtype)
        for dtype in ("float32", "bfloat16")
        for method in ("plain", "hook-1-bucket", "attached")
    ]
    for run in record["runs"]:
        if run["method"] == "attached":
            # Rank 2 serves 2 of 16 dimensions a step. Twice the 8 steps of a turn is the bound, as
            # in test_identity.py.
            assert 0 < run["largest_ratio"] < 2 * 16 / 2
            assert run["last_distance"] < 3  # x starts at 25
