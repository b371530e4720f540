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
from support.log_records import LogRecords
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Ledger,
    gradients,
    make_compressed,
    make_ddp,
    mean_gradients,
    outputs_of,
    relative_error,
    residuals_of,
    step,
)
from torch_powersgd import store_agreement

OPTIONS = tp.Options(start_powerSGD_iter=2, matrix_approximation_rank=2)
OTHER = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=3)
TOLERANCE = 1e-5  # the identity in float32, as in test_identity
WORLD_SIZE = 2


def _texts(rank: int) -> list[str]:
    """The handle as text: before any step, after each of five, and once it is detached."""
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    texts = [str(compression)]
    for i in range(5):
        mine = gradients(SHAPES, rank, i)
        if i == 4 and rank == 1:
            mine["wide"][0, 0] = torch.nan
        step(ddp, mine)
        texts.append(str(compression))
    compression.detach()
    return [*texts, repr(compression)]


def test_it_says_where_it_is() -> None:
    compressed = (
        r" step {}: the next one is {}\n  sent \S+ [kM]?B in place of \S+ [kM]?B \({} x fewer{}\)"
    )
    benefit = r"by the time of its stages, it pays on links below about \S+ Gbit/s"
    for texts in ranks.run(WORLD_SIZE, _texts):
        for text in texts[:-1]:
            assert text.startswith(
                "Compression over 2 processes: 3 of 5 parameters at matrix rank 2 in int8, from "
                "step 2 on\n"
            )
        assert "step 0: nothing was reduced so far" in texts[0]
        assert re.search(compressed.format(1, "exact", r"1\.0", ""), texts[1])
        assert re.search(compressed.format(2, "compressed", r"1\.0", ""), texts[2])
        number = r"[1-9]\d*\.\d"
        ratios = (number, f", {number} x where compressed")
        assert re.search(compressed.format(4, "compressed", *ratios), texts[4])
        assert re.search(benefit, texts[4])
        assert " step 5, 1 skipped: the next one is compressed" in texts[5]
        assert texts[6] == "Compression: it was detached"


def _ends_with_its_module(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    step(ddp, gradients(SHAPES, rank, 0))
    core = weakref.ref(compression._reducer)
    assert not compression.ended
    del ddp
    gc.collect()
    assert compression.ended
    assert core() is None, "its residuals are freed"
    assert str(compression) == "Compression: its module is gone"
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
        with pytest.raises(ValueError, match="this compression has ended: its module is gone"):
            call()


def _is_not_needed(rank: int) -> None:
    """A module stays compressed if its handle is dropped."""
    ddp = make_ddp(SHAPES)
    tp.attach(ddp, OTHER)
    gc.collect()
    before = tp.stats()["compressed_calls"]
    step(ddp, gradients(SHAPES, rank, 0))
    assert tp.stats()["compressed_calls"] == before + 1


def _outlived_by_its_scaler(rank: int) -> None:
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
    means = mean_gradients(SHAPES, WORLD_SIZE, 3)
    for name, output in outputs_of(ddp).items():
        assert relative_error(output, means[name]) < 1e-6  # the step has unscaled it


def _second_attach(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, OTHER)
    for i in range(2):
        with pytest.raises(ValueError, match="already"):
            tp.attach(ddp, OPTIONS)
        step(ddp, gradients(SHAPES, rank, i))
    assert compression.options == OTHER
    assert compression.stats()["steps"] == 2


def _paused(rank: int) -> None:
    ddp, compression = make_compressed(SHAPES, OTHER)
    ledger = Ledger()
    for i in range(6):
        means = mean_gradients(SHAPES, WORLD_SIZE, i)
        if i % 3 == 1:
            before = residuals_of(compression)
            with compression.paused():
                assert not compression.stats()["compressing"]
                outputs = step(ddp, gradients(SHAPES, rank, i))
            assert max(relative_error(outputs[name], means[name]) for name in SHAPES) < 1e-6
            after = residuals_of(compression)
            assert all(torch.equal(before[name], after[name]) for name in COMPRESSED)
        else:
            outputs = step(ddp, gradients(SHAPES, rank, i))
        ledger.add(outputs, means)
    with pytest.raises(ArithmeticError), compression.paused():
        raise ArithmeticError
    assert compression.stats()["compressing"]
    errors = ledger.errors(residuals_of(compression))
    assert max(errors.values()) < TOLERANCE, errors


def _resumed(rank: int) -> None:
    records = LogRecords(logging.INFO)
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    for i in range(4):
        step(ddp, gradients(SHAPES, rank, i))
    state = compression.state_dict()
    ddp, compression = make_compressed(SHAPES, OPTIONS)
    compression.load_state_dict(state)
    said = records.matching("the state of step 4 is loaded, with the residuals of 3 parameters")
    assert len(said) == (rank == 0)
    step(ddp, gradients(SHAPES, rank, 4))
    stats = compression.stats()
    assert stats["steps"] == 5
    assert stats["compressing"]
    assert "step 5: " in str(compression)
    compression.reset_stats()
    stats = compression.stats(flat=True)
    assert (stats["steps"], stats["compressed_calls"], stats["bytes_before"]) == (5, 0, 0)


def _tensors_anew(rank: int) -> None:
    """Other options take over what was not sent, after exact steps by another way."""
    ledger = Ledger()
    compression = tp.attach(gradients(SHAPES, rank, 0), OTHER)
    for i in range(8):
        tensors = gradients(SHAPES, rank, i)
        if i == 4:
            state = compression.state_dict()
            compression.detach()
            with pytest.raises(ValueError, match="this compression has ended: it was detached"):
                compression.all_reduce(tensors)
            compression = tp.attach(tensors, OPTIONS)
            compression.load_state_dict(state)
        compression.all_reduce(tensors).wait()
        ledger.add(tensors, mean_gradients(SHAPES, WORLD_SIZE, i))
    errors = ledger.errors(residuals_of(compression))
    assert max(errors.values()) < TOLERANCE, errors


CASES = (
    _ends_with_its_module,
    _is_not_needed,
    _outlived_by_its_scaler,
    _second_attach,
    _paused,
    _resumed,
    _tensors_anew,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_case(case: Callable[[int], None]) -> None:
    ranks.run(WORLD_SIZE, case)


def _attached_anew(rank: int) -> tuple[list[bool], dict[str, float]]:
    """Detaches a module, and attaches it with other options and the state."""
    ddp, compression = make_compressed(SHAPES, OTHER)
    ledger, exact = Ledger(), []
    for i in range(9):
        if i == 3:
            state = compression.state_dict()
            compression.detach()
        if i == 6:
            compression = tp.attach(ddp, dataclasses.replace(OTHER, matrix_approximation_rank=1))
            compression.load_state_dict(state)
        outputs, means = step(ddp, gradients(SHAPES, rank, i)), mean_gradients(SHAPES, 2, i)
        ledger.add(outputs, means)
        exact.append(max(relative_error(outputs[name], means[name]) for name in SHAPES) < 1e-6)
    assert compression.stats()["steps"] == 6
    return exact, ledger.errors(residuals_of(compression))


def test_a_detached_module_is_exact_until_it_is_attached_again() -> None:
    for exact, errors in ranks.run(WORLD_SIZE, _attached_anew):
        assert exact == [False] * 3 + [True] * 3 + [False] * 3
        assert max(errors.values()) < TOLERANCE, errors


def _mixed_up(rank: int) -> list[str]:
    """The errors where each process calls a method of another compression of the group."""
    handles = [tp.attach({name: torch.zeros(64, 64)}, OTHER) for name in ("first", "second")]
    states = [handle.state_dict() for handle in handles]
    calls = (handles[rank].state_dict, lambda: handles[rank].load_state_dict(states[rank]))
    errors = []
    for call in (*calls, handles[rank].detach):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below
            call()
        errors.append(str(caught.value))
    return errors


def test_processes_that_call_of_different_compressions_are_told_so() -> None:
    for saving, loading, ending in ranks.run(WORLD_SIZE, _mixed_up):
        for method, error in {"state_dict": saving, "detach": ending}.items():
            assert error.startswith(f"the module, the step or the arguments of {method} on rank 1")
        assert loading.endswith("rank 0 and on rank 1 have other parameters")


def _alone(rank: int, method: str) -> tuple[str, list[str]]:
    """Calls a method on rank 0 alone. Returns its error and its warnings."""
    _ddp, compression = make_compressed(SHAPES, OPTIONS)
    state = compression.state_dict()
    # From here on, as a rank that is only a little late would be named above.
    store_agreement.PATIENCE = timedelta(seconds=0.2)
    store_agreement.INTERVAL = timedelta(seconds=0.1)
    records = LogRecords(logging.WARNING)
    arguments = (state,) if method == "load_state_dict" else ()
    store = ranks.side_store()
    if rank == 1:
        store.wait(["rank 0 has given up"])
        return "", []
    with pytest.raises(ValueError, match="rank 1") as raised:
        getattr(compression, method)(*arguments)
    store.set("rank 0 has given up", "")
    return str(raised.value), [match.string for _, match in records.matching("rank")]


@pytest.mark.parametrize("method", ["state_dict", "load_state_dict", "detach"])
def test_a_process_that_does_not_call_is_named(method: str) -> None:
    (error, warnings), _ = ranks.run(WORLD_SIZE, _alone, method, op_timeout=3)
    assert error == f"rank 1 has not called {method} within 3 seconds"
    assert warnings == [f"rank 1 has not called {method}; rank 0 waits"]


def test_the_face_is_what_is_listed() -> None:
    assert dir(tp) == sorted(tp.__all__)
    assert all(hasattr(tp, name) for name in tp.__all__)
    with pytest.raises(TypeError, match="'rank' is not an option; did you mean matrix_approxim"):
        tp.Options(rank=3)  # type: ignore[call-arg]
