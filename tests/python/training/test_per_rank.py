# SPDX-License-Identifier: BSD-3-Clause
"""save_per_rank and load_per_rank: the last step that all processes have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support.on_ranks import on_ranks
from support.refusals import refuses


def _state(rank: int, step: int) -> dict[str, Any]:
    return {"weight": torch.full((3,), 10.0 * step + rank)}


def _save(folder: Path, rank: int, *steps: int) -> None:
    for step in steps:
        tp.save_per_rank(folder, step, _state(rank, step))
    dist.barrier()


def _names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@on_ranks()
def test_the_last_step_of_all(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert tp.load_per_rank(folder) is None
    _save(folder, rank, 5, 20, 30)
    if rank == 0:
        tp.save_per_rank(folder, 40, _state(0, 40))  # and the job is killed
        (folder / "step50-rank0of2.unfinished").write_bytes(b"half")
    dist.barrier()
    loaded = tp.load_per_rank(folder)
    assert loaded is not None
    assert loaded[0] == 30
    torch.testing.assert_close(loaded[1], _state(rank, 30), rtol=0, atol=0)
    dist.barrier()
    others = ["step20-rank1of2.pt", "step30-rank0of2.pt", "step30-rank1of2.pt"]
    assert _names(folder) == [*others, "step50-rank0of2.unfinished"], "a stale step 40 is gone"


@on_ranks()
def test_what_does_not_fit_is_an_error_on_all_processes(rank: int, tmp_path: Path) -> None:
    _save(tmp_path, rank, 10 + rank, 20 + rank)
    apart = "rank 0 has 10, 20; rank 1 has 11, 21"
    refuses(lambda: tp.load_per_rank(tmp_path), f"no step was saved by all processes: {apart}")

    _save(tmp_path, rank, 30)
    if rank == 1:
        (tmp_path / "step30-rank1of2.pt").write_bytes(b"damaged")
    dist.barrier()
    before = _names(tmp_path)
    refuses(lambda: tp.load_per_rank(tmp_path), "rank 1")
    assert _names(tmp_path) == before

    alone = [dist.new_group([each]) for each in range(2)][rank]
    number = "the checkpoints are of 2 processes, and 1 load them"
    refuses(lambda: tp.load_per_rank(tmp_path, alone), number)


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
@on_ranks(1)
def test_a_step_is_a_number(rank: int, step: Any, tmp_path: Path) -> None:
    refuses(lambda: tp.save_per_rank(tmp_path, step, {}), "step must be an integer >= 0")
