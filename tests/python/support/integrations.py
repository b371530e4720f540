# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the integrations' tests, and the libraries that they need."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import pytest

import torch_powersgd as tp

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=1, matrix_approximation_rank=1)
EVERY_THREE = functools.partial(
    tp.LocalSGD,
    sync_every=3,
    options={"matrix_approximation_rank": 1, "wire_dtype": None},
    warmup_steps=0,
)
# The models are then equal after each round.
EXACTLY = functools.partial(EVERY_THREE, options={"scope": "never"})

with_and_without_local_steps = pytest.mark.parametrize(
    "make",
    [
        pytest.param(None, id="every step"),
        pytest.param(EVERY_THREE, marks=pytest.mark.long, id="local steps"),
    ],
)


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")
