# SPDX-License-Identifier: BSD-3-Clause
"""What load_state_dict of the model means to local steps that run."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch.distributed as dist

from support.local_job import EVERY, Job
from support.on_ranks import all_agree, models_agree, on_ranks
from support.tensors import same

KINDS = pytest.mark.parametrize(
    "others", [{"fragments": 1}, {"fragment_sync_delay": 3}], ids=["", "in flight"]
)


@KINDS
@pytest.mark.parametrize("outer", [False, True], ids=["LocalSGD", "DiLoCo"])
@on_ranks(2)
def test_a_return_to_the_best_is_no_movement(rank: int, others: Any, outer: bool) -> None:
    """Without a learning rate, the model stays what was loaded, to the bit: no residual is left."""
    job = Job(outer, momentum=0, **others)
    best = copy.deepcopy(job.model.state_dict())
    job.train(rank, 0, 2 * EVERY + 2)
    assert not models_agree(job.model)
    job.model.load_state_dict(best)
    job.optimizer.param_groups[0]["lr"] = 0.0
    for i in range(2 * EVERY):
        if i == 0 and rank == 1:
            job.steps.step_skipped()
        else:
            job.train(rank, i, i + 1)
        assert same(job.model.state_dict().values(), best.values())
    job.optimizer.param_groups[0]["lr"] = 0.01
    job.train(rank, 0, 2 * EVERY)
    job.steps.sync(exact=True)
    assert models_agree(job.model)


@KINDS
@on_ranks(2)
def test_weights_for_an_evaluation_change_nothing(rank: int, others: Any) -> None:
    """Loaded into the model, and its own weights back, or into a copy of it."""
    plain, swapping = Job(**others), Job(**others)
    for i in range(3 * EVERY):
        plain.train(rank, i, i + 1)
        swapping.train(rank, i, i + 1)
        own = copy.deepcopy(swapping.model.state_dict())
        swapping.model.load_state_dict({name: 0.5 * value for name, value in own.items()})
        if i % 2:
            swapping.model.load_state_dict({name: 0.1 * value for name, value in own.items()})
        swapping.model.load_state_dict(own)
        for copied in (copy.deepcopy(swapping.model), pickle.loads(pickle.dumps(swapping.model))):
            copied.load_state_dict(plain.model.state_dict())
    assert same(plain.model.parameters(), swapping.model.parameters())


@on_ranks(2)
def test_the_state_of_the_steps_may_be_loaded_before_the_model(rank: int) -> None:
    job = Job(fragments=1)
    job.train(rank, 0, EVERY + 2)
    model, steps = copy.deepcopy(job.model.state_dict()), job.steps.state_dict(per_rank=True)
    moments = copy.deepcopy(job.optimizer.state_dict())
    job.train(rank, EVERY + 2, 2 * EVERY)
    after = copy.deepcopy(job.model.state_dict())
    for steps_first in (True, False):
        job.train(rank, 0, 3)
        if steps_first:
            job.steps.load_state_dict(steps)
        job.model.load_state_dict(model)
        if not steps_first:
            job.steps.load_state_dict(steps)
        job.optimizer.load_state_dict(copy.deepcopy(moments))
        job.train(rank, EVERY + 2, 2 * EVERY)
        assert same(job.model.state_dict().values(), after.values())


@on_ranks(2)
def test_all_may_load_what_one_of_them_has(rank: int) -> None:
    job = Job(fragments=1)
    job.train(rank, 0, 2)
    states: list[Any] = [job.model.state_dict()]
    dist.broadcast_object_list(states, 0)
    job.model.load_state_dict(states[0])
    job.optimizer.param_groups[0]["lr"] = 0.0
    job.train(rank, 0, EVERY)
    assert same(job.model.state_dict().values(), states[0].values())


@on_ranks(2)
def test_different_models_are_refused(rank: int) -> None:
    job = Job(fragments=1)
    job.train(rank, 0, 2)
    own = {name: (1 + rank) * value for name, value in job.model.state_dict().items()}
    job.model.load_state_dict(own)
    with pytest.raises(ValueError, match="loaded after LocalSGD was created, without a state of"):
        job.train(rank, 2, 3)
    assert same(job.model.state_dict().values(), own.values())
    assert not all_agree(own["0.bias"].tolist())
