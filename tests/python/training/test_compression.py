# SPDX-License-Identifier: BSD-3-Clause
"""The handle that attach returns: what it says, how long it lasts, and how it ends."""

from __future__ import annotations

import dataclasses
import gc
import logging
import re
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.ddp import make_compressed, outputs_of, step, train
from support.groups import world
from support.ledger import Ledger, residuals_of
from support.log_records import LogRecords
from support.on_ranks import on_ranks
from support.synthetic import COMPRESSED, SHAPES, gradients, mean_gradients
from support.tensors import Tensors, relative_error
from torch_powersgd import collective_call

OPTIONS = tp.Options(start_powerSGD_iter=2, matrix_approximation_rank=2)
OTHER = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=3)


def _is_exact(outputs: Tensors, i: int) -> bool:
    means = mean_gradients(SHAPES, 2, i)
    return max(relative_error(outputs[name], means[name]) for name in SHAPES) < 1e-6


@on_ranks(2)
def test_it_says_where_it_is(rank: int) -> None:
    """As text: before any step, after each of five, and once it is detached."""
    compressed = (
        r" step {}: the next one is {}\n  sent \S+ [kM]?B instead of \S+ [kM]?B \({} x fewer{}\)"
    )
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    texts = [str(compression)]
    for i in range(5):
        mine = gradients(SHAPES, rank, i)
        if i == 4 and rank == 1:
            mine["wide"][0, 0] = torch.nan
        step(ddp, mine)
        texts.append(str(compression))
    for text in texts:
        assert text.startswith(
            "Compression over 2 processes: 3 of 5 parameters at matrix rank 2 in int8, from "
            "step 2 on\n"
        )
    assert "step 0: nothing has been reduced yet" in texts[0]
    assert re.search(compressed.format(1, "exact", r"1\.0", ""), texts[1])
    assert re.search(compressed.format(2, "compressed", r"1\.0", ""), texts[2])
    number = r"[1-9]\d*\.\d"
    ratios = (number, f", {number} x where compressed")
    assert re.search(compressed.format(4, "compressed", *ratios), texts[4])
    benefit = r"judging by its stage times, it pays on links slower than about \S+ Gbit/s"
    assert re.search(benefit, texts[4])
    assert " step 5, 1 skipped: the next one is compressed" in texts[5]
    compression.detach()
    assert repr(compression) == "Compression: it was detached"


@on_ranks(2)
def test_it_ends_with_its_module(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    step(ddp, gradients(SHAPES, rank, 0))
    core = weakref.ref(compression._reducer)
    assert not compression.ended
    del ddp
    gc.collect()
    assert compression.ended
    assert core() is None, "its residuals are freed"
    assert str(compression) == "Compression: its module no longer exists"
    calls: list[Callable[[], Any]] = [
        compression.stats,
        compression.state_dict,
        lambda: compression.load_state_dict({}),
        compression.step_skipped,
        compression.discard_step,
        lambda: compression.grad_scale,
        lambda: compression.paused().__enter__(),
        compression.detach,
        lambda: compression.all_reduce([]),
        lambda: compression.comm_hook,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="can no longer be used: its module no longer exists"):
            call()


@on_ranks(2)
def test_it_is_outlived_by_its_scaler(rank: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ddp, compression = make_compressed(SHAPES, OTHER, scaler=scaler)
    core = weakref.ref(compression._reducer)
    del ddp
    gc.collect()
    assert core() is None
    ddp, compression = make_compressed(SHAPES, OTHER, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for i in range(4):
        if i == 2:
            assert compression.grad_scale == 8.0
            compression.detach()
        optimizer.zero_grad()
        scaler.scale(ddp(gradients(SHAPES, rank, i))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert _is_exact(outputs_of(ddp), 3)  # the step has unscaled it


@on_ranks(2)
def test_paused_steps_are_exact(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, OTHER)
    ledger = Ledger()
    for i in range(6):
        if i % 3 == 1:
            before = residuals_of(compression)
            with compression.paused():
                assert not compression.stats()["compressing"]
                [outputs] = train(ddp, [i], ledger)
            assert _is_exact(outputs, i)
            after = residuals_of(compression)
            assert all(torch.equal(before[name], after[name]) for name in COMPRESSED)
        else:
            train(ddp, [i], ledger)
    with pytest.raises(ArithmeticError), compression.paused():
        raise ArithmeticError
    assert compression.stats()["compressing"]
    ledger.check(compression)


@on_ranks(2)
def test_tensors_are_attached_anew(rank: int) -> None:
    """Other options take over what was not sent, after exact steps by another way."""
    ledger = Ledger()
    compression = tp.attach(gradients(SHAPES, rank, 0), OTHER)
    for i in range(8):
        tensors = gradients(SHAPES, rank, i)
        if i == 4:
            state = compression.state_dict()
            compression.detach()
            with pytest.raises(
                ValueError, match="this compression can no longer be used: it was detached"
            ):
                compression.all_reduce(tensors)
            compression = tp.attach(tensors, OPTIONS)
            compression.load_state_dict(state)
        compression.all_reduce(tensors).wait()
        ledger.add(tensors, mean_gradients(SHAPES, 2, i))
    ledger.check(compression)


@on_ranks(2)
def test_a_detached_module_is_exact_until_it_is_attached_again(rank: int) -> None:
    """It is attached with other options and the state."""
    ddp, compression = make_compressed(SHAPES, OTHER)
    ledger = Ledger()
    for i in range(9):
        if i == 3:
            state = compression.state_dict()
            compression.detach()
        if i == 6:
            compression = tp.attach(ddp, dataclasses.replace(OTHER, matrix_approximation_rank=1))
            compression.load_state_dict(state)
        [outputs] = train(ddp, [i], ledger)
        assert _is_exact(outputs, i) is (3 <= i < 6)
    assert compression.stats()["steps"] == 6
    ledger.check(compression)


@on_ranks(2)
def test_processes_that_call_of_different_compressions_are_told_so(rank: int) -> None:
    handles = [tp.attach({name: torch.zeros(64, 64)}, OTHER) for name in ("first", "second")]
    states = [handle.state_dict() for handle in handles]
    mine = handles[rank]
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": mine.state_dict,
        "load_state_dict": lambda: mine.load_state_dict(states[rank]),
        "detach": mine.detach,
    }
    for name, call in calls.items():
        said = f"^the calls of {name} must be the same .* hash of the parameter names is"
        with pytest.raises(ValueError, match=said):
            call()


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict", "detach"])
@on_ranks(2)
def test_a_process_that_does_not_call_is_named(rank: int, method: str) -> None:
    """Rank 0 calls a method alone."""
    _ddp, compression = make_compressed(SHAPES, OPTIONS)
    state = compression.state_dict()
    # From here on, as a rank that is only a little late would be named above.
    collective_call.PATIENCE = timedelta(seconds=0.2)
    collective_call.INTERVAL = timedelta(seconds=0.1)
    world().set_timeout(timedelta(seconds=0.5))
    records = LogRecords(logging.WARNING)
    store = ranks.side_store()
    if rank == 1:
        store.wait(["rank 0 has given up"])
        return
    late = f"^rank 1 has not called {method} within 0.5 seconds; all ranks must do so$"
    with pytest.raises(ValueError, match=late):
        getattr(compression, method)(*([state] if method == "load_state_dict" else []))
    store.set("rank 0 has given up", "")
    [(_, said)] = records.matching("rank")
    assert said.string == f"rank 1 has not called {method}; rank 0 is waiting"


def test_the_face_is_what_is_listed() -> None:
    assert dir(tp) == sorted(tp.__all__)
    assert all(hasattr(tp, name) for name in tp.__all__)
