# SPDX-License-Identifier: BSD-3-Clause
"""A job whose rank is killed in mid-step; torchrun's elastic agent starts it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support import elastic_program
from support.torchrun import torchrun

PROGRAM = Path(elastic_program.__file__)
KILL_AT = 7
# Otherwise workers share one store over all restarts. In it Gloo, wrapped or not, finds the
# addresses of processes that are gone.
NEW_STORE: dict[str, Any] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _run(folder: Path, kill_at: int) -> tuple[list[dict[str, Any]], str]:
    folder.mkdir()
    restarts = ["--max-restarts=1", "--monitor-interval=0.1"]
    ended = torchrun(*restarts, PROGRAM, folder, kill_at, **NEW_STORE)
    return [torch.load(folder / f"result.{rank}") for rank in range(2)], ended.stderr


def test_a_job_that_is_killed_in_mid_step_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, _ = _run(tmp_path / "whole", -1)
    last_saved = KILL_AT // elastic_program.SAVE_EVERY * elastic_program.SAVE_EVERY
    killed, log = _run(tmp_path / "killed", KILL_AT)
    assert "SIGKILL" in log or "exitcode: -9" in log or "Signal 9" in log
    for rank in range(2):
        assert whole[rank]["began"] == 0
        assert killed[rank]["began"] == last_saved
        # The bits are equal: each rank's own state was restored, and the sum of two has one order.
        assert torch.equal(killed[rank]["weights"], whole[rank]["weights"])
        assert torch.equal(whole[rank]["weights"], whole[0]["weights"])
