# SPDX-License-Identifier: BSD-3-Clause
"""Replicas of torchft over NCCL, on one GPU: one dies in the middle of a step and comes back."""

from __future__ import annotations

import pytest

from support.cuda_ranks import needs_cuda

pytest.importorskip("torchft")

from replica import Death, Kind
from test_deaths import EVERY, train_through

pytestmark = needs_cuda


def test_a_replica_dies_in_the_middle_of_a_step_and_comes_back() -> None:
    train_through(Kind(device="cuda", limit=45), [Death(EVERY, "exchange")])
