# SPDX-License-Identifier: BSD-3-Clause
"""A job whose rank is killed in mid-step; torchrun's elastic agent starts it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support import elastic_program, ranks
from support.torchrun import torchrun

PROGRAM = Path(elastic_program.__file__)
KILL_AT = 7
# Otherwise workers share one store over all restarts. In it Gloo, wrapped or not, finds the
# addresses of processes that are gone.
NEW_STORE: dict[str, Any] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _results(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(folder / f"result.{rank}") for rank in range(2)]


def test_a_job_that_is_killed_in_mid_step_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    ranks.run(2, elastic_program.train, tmp_path / "whole", options=elastic_program.OPTIONS)
    whole = _results(tmp_path / "whole")

    (tmp_path / "killed").mkdir()
    restarts = ["--max-restarts=1", "--monitor-interval=0.1"]
    log = torchrun(*restarts, PROGRAM, tmp_path / "killed", KILL_AT, **NEW_STORE).stderr
    killed = _results(tmp_path / "killed")
    last_saved = KILL_AT // elastic_program.SAVE_EVERY * elastic_program.SAVE_EVERY

    assert "SIGKILL" in log or "exitcode: -9" in log or "Signal 9" in log
    for rank in range(2):
        assert whole[rank]["began"] == 0
        assert killed[rank]["began"] == last_saved
        # The bits are equal: each rank's own state was restored, and the sum of two has one order.
        assert torch.equal(killed[rank]["weights"], whole[rank]["weights"])
        assert torch.equal(whole[rank]["weights"], whole[0]["weights"])
