# SPDX-License-Identifier: BSD-3-Clause
"""The errors of torch_powersgd.integrations. test_trainers.py trains with each library."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_powersgd as tp


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("lightning", "lightning"),
        ("ray", "'ray[train]'"),
        ("torchtitan", "torchtitan"),
        ("transformers", "transformers"),
    ],
)
def test_a_missing_library_is_named(library: str, package: str) -> None:
    program = (
        f"import sys; sys.modules[{library!r}] = None\nimport torch_powersgd.integrations.{library}"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: torch_powersgd.integrations.{library} needs")
    assert f"pip install {package}" in last


def test_the_package_imports_none_of_the_libraries() -> None:
    program = (
        "import sys, torch_powersgd, torch_powersgd.integrations.accelerate\n"
        "libraries = {'accelerate', 'lightning', 'ray', 'torchtitan', 'transformers'}\n"
        "print(*libraries & {*sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == ""


def test_a_trainer_without_ddp_is_refused() -> None:
    if find_spec("transformers") is None:  # importing it takes seconds
        pytest.skip("needs transformers")
    from torch_powersgd.integrations.transformers import Compression

    trainer: Any = SimpleNamespace(model_wrapped=torch.nn.Linear(2, 2))
    compression = Compression(trainer, tp.Options())
    with pytest.raises(ValueError, match="must wrap its model in DistributedDataParallel, got Lin"):
        compression.on_train_begin(None, None, None)
