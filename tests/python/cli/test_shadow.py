# SPDX-License-Identifier: BSD-3-Clause
"""The shadow command on two ranks: its verdict, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import command_line, launch, ranks
from torch_powersgd.cli.shadow import of_layers
from torch_powersgd.shadow_mode import Shadow, ShadowedLayer

MODULE = """
import torch

def model():
    global optimizer
    torch.manual_seed(0)
    model = torch.nn.Linear(60, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model

def doubles():
    return model().double()

def model_with_unused():
    wrapped = torch.nn.Sequential(model())
    wrapped.unused = torch.nn.Parameter(torch.ones(2))
    return wrapped

def backward(model):
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    (model(torch.randn(4, 60, dtype=dtype)) - 1).square().mean().backward()

def step(model):
    backward(model)
    optimizer.step()

def forward(model):
    model(torch.randn(4, 60))

def without_arguments():
    pass
"""


def _run_rank(
    rank: int, folder: Path, port: int, model: str, arguments: list[str]
) -> tuple[object, str]:
    launch.enter(rank, 2, port)
    (folder / "models_of_shadow.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    model = f"models_of_shadow:{model}"
    return command_line.run("shadow", model, "--warmup-steps", "5", *arguments)


def _two(folder: Path, *arguments: str, model: str = "model") -> list[tuple[object, str]]:
    given = (folder, launch.free_port(), model, arguments)
    started = ranks.outcomes(2, _run_rank, *given, backend=None)
    return [outcome.value for outcome in started]


@pytest.mark.parametrize(
    ("step", "allowed", "verdict"),
    [
        ("step", "1,12,50", "Matrix rank 12 is enough: the error of the gradients is 0.0"),
        ("backward", "1,2", "No matrix rank up to 2 is enough: at 2, the error of the"),
        (
            "step",
            "50",
            "Nothing is compressed at these matrix ranks. The highest matrix rank that compresses "
            "a weight of this model is 13.",
        ),
    ],
)
def test_the_verdict_comes_first(step: str, allowed: str, verdict: str, tmp_path: Path) -> None:
    options = ["--steps", "20", "--ranks", allowed]
    (status, said), other = _two(tmp_path, "--step", f"models_of_shadow:{step}", *options)
    assert status == 0
    words = " ".join(said.split())
    assert words.startswith(verdict), words
    assert "gradients over 20 steps: " in words
    unchanged = "models_of_shadow:backward changed no parameter"
    assert (unchanged in words) == (step == "backward")
    assert other == (0, "")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("without_arguments", "must be of the form"),
        ("forward", "forward must call backward() each time, but shadow has taken 0 of 2 steps"),
    ],
)
def test_a_step_of_another_form_is_refused(step: str, message: str, tmp_path: Path) -> None:
    arguments = ["--step", f"models_of_shadow:{step}", "--steps", "2"]
    (status, said), other = _two(tmp_path, *arguments)
    assert status == 2
    assert message in said
    assert other == (2, "")


def test_a_model_that_is_averaged_exactly_is_no_reason_to_lower_the_rank(tmp_path: Path) -> None:
    options = ["--step", "models_of_shadow:step", "--steps", "2"]
    (status, said), _ = _two(tmp_path, *options, model="doubles")
    assert status == 0
    assert " ".join(said.split()).startswith(
        "Nothing is compressed at these matrix ranks. This model has no weight that any matrix "
        "rank compresses. Parameters in float64 are averaged exactly."
    )


def test_parameters_without_a_gradient(tmp_path: Path) -> None:
    options = ["--step", "models_of_shadow:step", "--steps", "2", "--find-unused-parameters"]
    (status, said), _ = _two(tmp_path, *options, model="model_with_unused")
    assert status == 0, said


def test_layers_with_a_large_error_get_matrix_ranks_of_their_own() -> None:
    errors = {"head": (0.9, 0.5), "embedding": (0.4, 0.05), "body": (0.08, 0.01)}
    shapes = {"head": (10, 10), "embedding": (20, 10), "body": (100, 10)}
    shadow = object.__new__(Shadow)
    shadow.ranks, shadow.step, shadow.steps = (4, 16), 50, 50
    shadow._errors = {4: 0.09, 16: 0.02}
    shadow.layers = {
        rank: [ShadowedLayer(n, shapes[n], rank, e[i], 0, 0) for n, e in errors.items()]
        for i, rank in enumerate(shadow.ranks)
    }
    advice = of_layers(shadow)
    assert advice.startswith("At matrix rank 4, the error of 2 of 3 layers, up to 0.90, is above")
    assert advice.endswith('{"matrix_ranks": {"head": 0, "embedding": 16}}')
    shadow.layers = {4: shadow.layers[4][:2]}
    assert not of_layers(shadow)  # nothing is left for which rank 4 is enough
