# SPDX-License-Identifier: BSD-3-Clause
"""States of local steps: resumed to the bit, or by another number of ranks with nothing lost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from support import ranks
from support.ledger import TOLERANCE, residuals_of
from support.local_job import EVERY, Job
from support.on_ranks import models_agree, on_ranks
from support.states import from_bytes, to_bytes
from support.tensors import relative_error, same


@pytest.mark.parametrize("outer", [False, True], ids=["LocalSGD", "DiLoCo"])
@on_ranks(2)
def test_each_process_goes_on_to_the_bit(rank: int, outer: bool) -> None:
    """Also in the middle of a round, and with fragments that have had different rounds."""
    for end in (EVERY, 2 * EVERY + 3):
        whole, resumed = (Job(outer) for _ in range(2))
        whole.train(rank, 0, end)
        saved = whole.save()
        resumed.load(saved)
        for job in (whole, resumed):
            job.train(rank, end, end + 2 * EVERY + 1)
        assert same(resumed.model.parameters(), whole.model.parameters())
        of_whole, of_resumed = whole.steps.stats(), resumed.steps.stats()
        for count in ("steps", "rounds"):
            assert of_resumed[count] == of_whole[count]
        assert of_resumed["ratio"] < 2 * of_whole["ratio"]  # without the steps before


@pytest.mark.parametrize("outer", [False, True], ids=["LocalSGD", "DiLoCo"])
@on_ranks(2)
def test_a_new_process_gets_the_state_from_dcp(rank: int, outer: bool, tmp_path: Path) -> None:
    """Also the outer optimizer's of the fragment that has had no round yet."""
    for end in (0, EVERY // 2, EVERY):
        saved, loaded = Job(outer), Job(outer)
        saved.train(rank, 0, end)
        dcp.save({"steps": saved.steps}, checkpoint_id=tmp_path)
        dcp.load({"steps": loaded.steps}, checkpoint_id=tmp_path)
        saved.steps.load_state_dict(saved.steps.state_dict())
        loaded.optimizer.load_state_dict(copy.deepcopy(saved.optimizer.state_dict()))
        for job in (saved, loaded):
            job.train(rank, end, end + 2 * EVERY)
        assert same(saved.model.parameters(), loaded.model.parameters())


@pytest.mark.parametrize("outer", [False, True], ids=["LocalSGD", "DiLoCo"])
@on_ranks(2)
def test_a_state_is_a_snapshot(rank: int, outer: bool) -> None:
    job = Job(outer)
    job.train(rank, 0, EVERY)
    state = job.steps.state_dict()
    before = to_bytes(state)
    for _ in range(2):
        job.steps.load_state_dict(state)
        job.train(rank, EVERY, 3 * EVERY)
        assert to_bytes(state) == before


@pytest.mark.parametrize("outer", [False, True], ids=["LocalSGD", "DiLoCo"])
@on_ranks(2)
def test_states_of_different_jobs_are_refused(rank: int, outer: bool) -> None:
    """Their anchors or momentum would differ for ever, because only means move them."""
    states: list[dict[str, Any]] = []
    for job in (Job(outer), Job(outer)):
        job.train(rank + 2 * len(states), 0, EVERY)
        states.append(job.steps.per_rank.state_dict())
    with pytest.raises(ValueError, match="the same on all ranks: checksum is"):
        job.steps.load_state_dict(states[rank])


@on_ranks(2)
def test_a_difference_in_the_last_fragment_changes_nothing(rank: int) -> None:
    states = []
    for first in (0, EVERY):
        job = Job()
        job.train(rank, first, first + EVERY)
        states.append(job.steps.state_dict())
    mixed = copy.deepcopy(states[1])
    if rank == 1:
        mixed["fragments"]["1"]["compression"] = states[0]["fragments"]["1"]["compression"]
    before = to_bytes(states[1])
    with pytest.raises(ValueError, match="load_state_dict loads must be the same on all ranks: "):
        job.steps.load_state_dict(mixed)
    assert to_bytes(job.steps.state_dict()) == before


def _saved(rank: int) -> tuple[bytes, bytes]:
    """The state that all ranks share, and what the anchors would be with nothing unsent."""
    job = Job()
    job.train(rank, 0, 2 * EVERY + 3)
    job.steps.sync()
    return to_bytes(job.steps.state_dict()), to_bytes(_whole(job))


def _whole(job: Job) -> dict[str, torch.Tensor]:
    residuals: dict[str, torch.Tensor] = {}
    for fragment in job.steps._fragments:
        residuals |= residuals_of(fragment.compression)
    assert residuals
    return {
        name: anchor.double() - residuals.get(name, 0)
        for fragment in job.steps._fragments
        for name, anchor in fragment.anchors.items()
    }


def _resumed(rank: int, saved: tuple[bytes, bytes]) -> None:
    job = Job()
    job.train(rank, 0, 1)  # its parameters are its own
    job.steps.load_state_dict(from_bytes(saved[0]))
    assert models_agree(job.model)
    for name, wanted in from_bytes(saved[1]).items():
        assert relative_error(_whole(job)[name], wanted) < TOLERANCE[torch.float32]
    if dist.get_world_size() == 1:  # It sends nothing, and keeps the residual for others.
        return
    for _ in range(40):  # rounds without steps send what is left, a rank of 2 in each
        job.steps.sync()
    for name, parameter in job.model.named_parameters():
        error = relative_error(parameter, from_bytes(saved[1])[name])
        assert error < 1e-3, (name, error)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_any_number_of_ranks_takes_over(after: int) -> None:
    ranks.run(after, _resumed, ranks.run(2, _saved)[0])


@on_ranks(2)
def test_a_load_with_a_round_in_flight_is_the_state_that_was_saved(rank: int) -> None:
    """Rolls back in the documented order: the model, the optimizer, and the steps."""
    job = Job(fragment_sync_delay=3)
    job.train(rank, 0, EVERY)
    saved = job.save()
    job.train(rank, EVERY, 2 * EVERY + 1)
    assert any(fragment.in_flight for fragment in job.steps._fragments)
    job.load(saved)
    assert same(job.model.state_dict().values(), from_bytes(saved)["model"].values())
    resumed = Job(fragment_sync_delay=3)
    resumed.load(saved)
    for each in (job, resumed):
        each.train(rank, EVERY, 3 * EVERY)
    assert same(job.model.parameters(), resumed.model.parameters())
