# SPDX-License-Identifier: BSD-3-Clause
"""Ray Train on two local workers, one of which is killed once."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import ray_program
import torch
from ray_driver import ray_driver
from ray_program import EXACT, OPTIONS, SAVED, STEPS

from support import ranks


@pytest.mark.long
def test_workers_train_and_resume_as_ranks_without_ray_do(tmp_path: Path) -> None:
    if find_spec("ray") is None:  # importing it takes seconds
        pytest.skip("needs ray")
    ray_driver(Path(ray_program.__file__), tmp_path)
    results = [torch.load(tmp_path / f"result.{rank}") for rank in range(2)]

    alone = ranks.run(2, ray_program.final_weights, options=OPTIONS)
    for rank in range(2):
        assert results[rank]["backend"] == "powersgd"
        # The sum of two gradients has one order, so that all bits are equal.
        assert results[rank]["weights"] == alone[rank]
        assert results[rank]["weights"] == results[0]["weights"]
        stats = results[rank]["stats"]
        assert stats["steps"] == STEPS
        assert stats["exact_calls"] == 0  # the state's steps count, so that none is exact again
        assert stats["compressed_calls"] == STEPS - SAVED
        assert stats["bytes_before"] > 3 * stats["bytes_after"]
    assert SAVED > EXACT
