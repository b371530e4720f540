# SPDX-License-Identifier: BSD-3-Clause
"""Shadow mode on a GPU: the body of the test on the CPU runs there."""

from __future__ import annotations

import pytest
import test_shadow_mode

from support.cuda_ranks import BACKEND, INNERS, needs_cuda, options_of, run

pytestmark = needs_cuda


@pytest.mark.parametrize("inner", INNERS)
def test_errors_are_those_of_attached_training(inner: str) -> None:
    options = {"wire_dtype": None}
    run(test_shadow_mode.compared, 2, options, BACKEND, "cuda", options=options_of(inner))
