# SPDX-License-Identifier: BSD-3-Clause
"""A reducer that is detached: exact for ever, without memory, and its module takes another one."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.synthetic import SHAPES, gradients, make_attached, step, to_numpy
from torch_powersgd._core import _C
from torch_powersgd.attach import attachment_of
from torch_powersgd.ddp import parameters_of
from torch_powersgd.lookup import find_backends

OPTIONS = tp.Options(start_powerSGD_iter=0, matrix_approximation_rank=2)


def _is_exact(rank: int, i: int, ddp: DistributedDataParallel) -> bool:
    mine, other = gradients(SHAPES, rank, i), gradients(SHAPES, 1 - rank, i)
    outputs = step(ddp, mine)
    return all((outputs[name] == (g + other[name]) / 2).all() for name, g in mine.items())


def _takes_another(rank: int) -> None:
    ddp = make_attached(SHAPES, OPTIONS)
    first = attachment_of(ddp).model

    def another() -> _C.BucketReducer:
        found = parameters_of(ddp)
        backend = find_backends(ddp.process_group)[0]
        return _C.BucketReducer(backend, list(found), list(found.values()), OPTIONS._core())

    before = to_numpy(step(ddp, gradients(SHAPES, rank, 0)))
    assert first.compressing
    for paused in (False, True):
        first.active = not paused
        with pytest.raises(ValueError, match="this module is attached already: use what attach"):
            _C.register_ddp_hook(ddp.reducer, another())
    for _ in range(2):
        first.detach()
    assert first.detached
    assert first.starts_at is None
    first.active = True
    assert not first.active
    assert _is_exact(rank, 1, ddp)
    with pytest.raises(ValueError, match="detach.. has freed the residuals and factors"):
        first.states.export_state()
    second = another()
    _C.register_ddp_hook(ddp.reducer, second)
    after = to_numpy(step(ddp, gradients(SHAPES, rank, 0)))
    for name, output in before.items():
        assert (after[name] == output).all(), name  # from a new start
    assert second.stats()["compressed_calls"] == 1
    assert first.states.step == 2


def test_a_detached_module_is_exact_and_takes_another_reducer() -> None:
    ranks.run(2, _takes_another, options=OPTIONS)


def _after_the_group(rank: int) -> None:
    ddp = make_attached(SHAPES, OPTIONS)
    step(ddp, gradients(SHAPES, rank, 0))
    find_backends(ddp.process_group)[0].shutdown()
    attachment_of(ddp).model.detach()


def test_a_module_may_be_detached_after_its_group_has_ended() -> None:
    ranks.run(2, _after_the_group, options=OPTIONS)
