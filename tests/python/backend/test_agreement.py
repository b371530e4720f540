# SPDX-License-Identifier: BSD-3-Clause
"""Calls that every rank must make: an absent rank is named, and errors reach every rank."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_powersgd as tp
from support import launch, ranks
from support.ddp import make_ddp, step
from support.deadline import UNLIMITED
from support.groups import world
from support.on_ranks import on_ranks
from support.synthetic import SHAPES, gradients, mean_gradients
from support.tensors import relative_error
from torch_powersgd import agreement, collective_call
from torch_powersgd.agreement import agree

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0)


def _hurry() -> None:
    """Lets the waits end sooner than a user's."""
    collective_call.PATIENCE = timedelta(seconds=0.3)
    collective_call.INTERVAL = timedelta(seconds=0.1)


class _Heard(io.StringIO):
    """Keeps what a rank says, and lets the others know that it has said something."""

    def write(self, text: str) -> int:
        ranks.side_store().set("heard", "1")
        return super().write(text)


@on_ranks(options=OPTIONS)
def test_a_rank_that_comes_late_is_waited_for(rank: int) -> None:
    """Rank 1 is busy for longer than the others wait, with another group's collectives too."""
    _hurry()
    gloo = dist.new_group([1], backend="gloo")
    ddp = make_ddp(SHAPES)
    with contextlib.redirect_stderr(_Heard()) as heard:
        if rank == 1:
            ranks.side_store().wait(["heard"])
            dist.all_reduce(torch.ones(3), group=gloo)
        tp.attach(ddp)
    waits = "rank 1 has not called attach; rank 0 is waiting"
    assert waits in heard.getvalue() if rank == 0 else "waiting" not in heard.getvalue()
    outputs, means = step(ddp, gradients(SHAPES, rank, 0)), mean_gradients(SHAPES, 2, 0)
    assert relative_error(outputs["bias"], means["bias"]) < 1e-6  # the bias is a raw segment


@on_ranks(3)
def test_waiting_ends_with_the_groups_time_out(rank: int) -> None:
    """Rank 2 of the job, which is rank 1 of a group, neither calls attach nor anything else."""
    _hurry()
    store, group = ranks.side_store(), dist.new_group([0, 2], backend="cpu:powersgd")
    if rank == 0:
        group.set_timeout(timedelta(seconds=2))
        with pytest.raises(ValueError, match="rank 2 has not called attach within 2 seconds"):
            tp.attach(make_ddp(SHAPES, process_group=group))
        store.set("done", "1")
    else:
        if rank == 2:
            make_ddp(SHAPES, process_group=group)
        store.wait(["done"])


def test_absent_ranks_are_named_in_the_plural() -> None:
    timeout = timedelta(seconds=0.1)
    call = collective_call.CollectiveCall(dist.HashStore(), 0, range(4), "called attach", timeout)
    with pytest.raises(ValueError, match="^ranks 1, 2, 3 have not called attach within"):
        call.agree({}, lambda everyone: "")


def _leave_after(store: dist.Store, ranks_: list[str]) -> None:
    store.wait(ranks_)
    os._exit(0)


def _other_backend(rank: int, backends: list[str]) -> str:
    _hurry()
    store = ranks.side_store()
    if rank == 2:  # Gloo waits for the others, which do not come
        threading.Thread(target=_leave_after, args=(store, ["0", "1"]), daemon=True).start()
    try:
        ranks.init_group(backends[rank], op_timeout=UNLIMITED)
    except (ValueError, RuntimeError) as error:
        store.set(str(rank), "1")
        return str(error)
    return ""


def test_a_rank_that_starts_another_backend_is_named() -> None:
    backends = ["cpu:powersgd", "cpu:powersgd", "cpu:gloo"]
    outcomes = ranks.outcomes(3, _other_backend, backends, backend=None)
    for outcome in outcomes[:2]:
        assert "rank 2 created a gloo process group instead of a powersgd one" in outcome.value


def _ends_after_its_error(rank: int, port: int, folder: Path, patience: float) -> None:
    """Rank 0 hosts the store. The others are slow to read what it has found."""
    launch.enter(rank, 3, port)
    collective_call.PATIENCE = timedelta(seconds=patience)
    wait = collective_call.CollectiveCall._wait

    def wait_slowly(call: collective_call.CollectiveCall, keys: list[str]) -> str:
        found = wait(call, keys)
        time.sleep(1)
        return found

    if rank > 0:
        collective_call.CollectiveCall._wait = wait_slowly  # type: ignore[assignment,method-assign]
    try:
        dist.init_process_group("cpu:powersgd", pg_options={"random_seed": rank // 2})
    except Exception as error:
        (folder / str(rank)).write_text(str(error))
    os._exit(0)


def test_all_ranks_hear_of_an_error_before_the_host_of_the_store_ends(tmp_path: Path) -> None:
    ranks.outcomes(3, _ends_after_its_error, launch.free_port(), tmp_path, 30.0, backend=None)
    messages = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    assert "random_seed is 0 on rank 0 and 1 on rank 2" in messages[0]
    assert messages == messages[:1] * 3


def _calls_late(rank: int, port: int, folder: Path) -> None:
    """Rank 0 hosts the store, and gives up first. Rank 2 does not call."""
    launch.enter(rank, 3, port)
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0)
    if rank == 1:
        store.wait(["rank 0 waits"])
    if rank < 2:
        seconds = timedelta(seconds=2 + 60 * rank)
        call = collective_call.CollectiveCall(store, rank, range(3), "called attach", seconds)
        store.set(f"rank {rank} waits", "")
        with pytest.raises(ValueError, match="attach") as raised:
            call.agree({}, lambda everyone: "")
        (folder / str(rank)).write_text(str(raised.value))
    else:
        store.wait(["rank 1 waits"])
    os._exit(0)


def test_all_ranks_hear_of_an_absent_rank_before_the_host_of_the_store_ends(tmp_path: Path) -> None:
    ranks.outcomes(3, _calls_late, launch.free_port(), tmp_path, backend=None)
    for rank in (0, 1):
        message = (tmp_path / str(rank)).read_text()
        assert message == "rank 2 has not called attach within 2 seconds; all ranks must do so"


@on_ranks(3)
def test_ranks_without_a_call_that_fails_are_named(rank: int) -> None:
    """The call fails on two ranks, and later on all of them."""
    agreement.GRACE = timedelta(seconds=2)
    for absent in (1, 0):
        if rank != absent:
            deed = f"called all_reduce without {absent}"
            found = agreement.absent_from(world(), deed)
            assert found == f"rank {absent} has not {deed}"
    agreement.GRACE = timedelta(seconds=UNLIMITED)
    with (
        pytest.raises(RuntimeError, match="^closed$"),
        agreement.naming_absent(world(), "called all_reduce with all ranks"),
    ):
        raise RuntimeError("closed")


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"scaler": 3}, "scaler must be .* int"),
        (
            {"options": {"matrix_approximation_rank": 0}},
            "options of attach: matrix_approximation_rank .*>= 1.* got 0",
        ),
        ({"options": {"rank": 4}}, "options of attach: 'rank' is not an option"),
        ({"rank": 4}, "options of attach: 'rank' is not an option"),
        ({"options": 4}, "options of attach must be .* got int"),
    ],
)
@on_ranks()
def test_a_bad_argument_on_one_rank_is_an_error_on_every_rank(
    rank: int, bad: dict[str, Any], error: str
) -> None:
    ddp = make_ddp(SHAPES)
    with pytest.raises(ValueError, match=f"rank 1: .*{error}"):
        tp.attach(ddp, **(bad if rank == 1 else {}))
    # Nothing has happened: the right call still works.
    tp.attach(ddp, OPTIONS)
    step(ddp, gradients(SHAPES, rank, 0))
    assert tp.stats()["compressed_calls"] == 1


@on_ranks()
def test_an_error_of_any_type_is_a_value_error_on_every_rank(rank: int) -> None:
    def make() -> tuple[None, dict[str, Any]]:
        if rank == 1:
            raise KeyError("w")
        return None, {}

    with pytest.raises(ValueError, match="^rank 1: KeyError: 'w'$"):
        agree(world(), "load", make, lambda everyone: "")


@on_ranks(backend=None)
def test_a_group_that_is_made_again_knows_nothing_of_the_first(rank: int) -> None:
    """Both share a store. Their options differ at first, and those of attach in the first one."""
    store = ranks.side_store()

    def init(**options: int) -> None:
        dist.init_process_group(
            "cpu:powersgd", store=store, rank=rank, world_size=2, pg_options=options
        )

    for attached in ([1, 2], [2, 2]):
        with pytest.raises(ValueError, match="random_seed"):
            init(random_seed=rank)
        init()
        differs = pytest.raises(ValueError, match="matrix_approximation_rank")
        with differs if attached[0] != attached[1] else contextlib.nullcontext():
            tp.attach(make_ddp(SHAPES), {"matrix_approximation_rank": attached[rank]})
        dist.barrier()
        dist.destroy_process_group()


@on_ranks(options=OPTIONS)
def test_calls_leave_no_keys_in_the_store(rank: int) -> None:
    ddp, keys = make_ddp(SHAPES), []
    for _ in range(8):
        compression = tp.attach(ddp)
        compression.load_state_dict(compression.state_dict())
        compression.detach()
        dist.barrier()
        keys.append(world().get_group_store().num_keys())
        dist.barrier()
    assert len(set(keys[1:])) == 1, keys
