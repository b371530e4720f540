# SPDX-License-Identifier: BSD-3-Clause
"""The examples with other libraries' training loops, each started twice."""

from __future__ import annotations

import re
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ray_driver import ray_driver

from support.launch import run_program
from support.repository import ROOT
from support.torchrun import warnings_in

EXAMPLES = ROOT / "examples"
WARM_UP = 10  # start_powerSGD_iter of the examples


# The imports of each example that are not of this package.
PACKAGES = {
    "accelerate": ("accelerate", "rich", "sklearn"),
    "lightning": ("lightning", "rich", "sklearn"),
    "ray": ("ray", "rich", "sklearn"),
    "transformers": ("accelerate", "transformers"),
}


def _start(library: str, arguments: tuple[Any, ...]) -> tuple[float, int, int, float]:
    program = EXAMPLES / f"with_{library}.py"
    if library == "ray":
        stdout = ray_driver(program, *arguments).stdout
    else:
        with tempfile.TemporaryDirectory() as folder:
            first, second = run_program(program, *arguments, folder=Path(folder))
        assert not warnings_in(first.stderr + second.stderr)
        stdout = first.stdout
    said = re.search(
        r"loss (\S+); (\d+) buckets sent exactly, (\d+) compressed, (\S+) times", stdout
    )
    assert said, stdout
    return float(said[1]), int(said[2]), int(said[3]), float(said[4])


def test_every_layer_is_shown_in_tensorboard(tmp_path: Path) -> None:
    for package in ("rich", "sklearn", "tensorboard"):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _start("tensorboard", ("--epochs", 1, "--folder", tmp_path))
    events = EventAccumulator(str(tmp_path)).Reload()
    captured = events.Scalars("powersgd/layers/classify.0.weight/captured")
    assert [scalar.step for scalar in captured] == [20, 30, 40]
    assert all(0 < scalar.value < 1 for scalar in captured)
    assert events.Scalars("powersgd/compressed_ratio")[-1].value > 10


@pytest.mark.parametrize(
    ("library", "first", "second"),
    [
        ("accelerate", ("--epochs", 1), ("--epochs", 1)),
        pytest.param("lightning", ("--epochs", 1), ("--epochs", 2), marks=pytest.mark.long),
        pytest.param("ray", ("--epochs", 1), ("--epochs", 1), marks=pytest.mark.long),
        pytest.param("transformers", ("--steps", 20), ("--steps", 40), marks=pytest.mark.long),
    ],
)
def test_an_example_compresses_and_goes_on_from_its_checkpoint(
    library: str, first: tuple[Any, ...], second: tuple[Any, ...], tmp_path: Path
) -> None:
    for package in PACKAGES[library]:
        if find_spec(package) is None:  # importing them takes seconds
            pytest.skip(f"needs {package}")
    folder = ("--folder", tmp_path / "checkpoint")
    loss, exact, compressed, _ = _start(library, (*first, *folder))
    assert exact >= WARM_UP
    assert exact % WARM_UP == 0  # as many buckets in each step
    assert compressed > 0

    later_loss, exact, compressed, ratio = _start(library, (*second, *folder))
    assert exact == 0  # the step count was loaded, so the warm-up has not begun anew
    assert compressed > 0
    assert ratio > 5
    assert later_loss < loss
