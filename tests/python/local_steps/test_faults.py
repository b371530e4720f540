# SPDX-License-Identifier: BSD-3-Clause
"""Local steps that go wrong: skipped steps, numbers that are not finite, arguments that are not."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support import ranks
from support.groups import world
from support.local_job import EVERY, EXACT, OPTIONS, backward, make_net, sgd, take_step
from support.log_records import LogRecords
from support.on_ranks import models_agree, on_ranks
from support.refusals import refuses
from support.tensors import relative_error, same
from torch_powersgd import agreement, collective_call
from torch_powersgd.local_steps import watch
from torch_powersgd.units import size_text


@on_ranks(2)
def test_a_loop_that_skips_on_one_rank_says_so(rank: int) -> None:
    model = make_net()
    optimizer = sgd(model)
    steps = tp.LocalSGD(model, optimizer, EVERY, EXACT, warmup_steps=0)
    for i in range(2 * EVERY):
        backward(model, rank, i)
        if rank == 1 and i in (2, 3):
            steps.step_skipped()
        else:
            optimizer.step()
        assert models_agree(model) is ((i + 1) % EVERY == 0)


@pytest.mark.parametrize("delay", [0, 2])
@on_ranks(2)
def test_a_round_that_is_not_finite_might_as_well_not_have_been(rank: int, delay: int) -> None:
    """All ranks are where they were after the round before, with their residuals.

    The residual is then held in another form, of which the last bit may differ.
    """
    models = [make_net(), make_net()]
    optimizers = [sgd(model) for model in models]
    broken, other = (
        tp.LocalSGD(m, o, EVERY, OPTIONS, fragment_sync_delay=delay, warmup_steps=0)
        for m, o in zip(models, optimizers, strict=True)
    )

    def one_round(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for i in range(EVERY):
            take_step(model, optimizer, rank, number * EVERY + i)

    for number in range(2):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_round(model, optimizer, number)
    for steps in (broken, other):
        steps.sync()  # or the steps beside a round would be kept
    before = [parameter.detach().clone() for parameter in models[0].parameters()]
    if rank == 1:
        with torch.no_grad():
            list(models[0].parameters())[-1][5] = torch.nan
    one_round(models[0], optimizers[0], 7)
    for after, parameter in zip(models[0].parameters(), before, strict=True):
        assert relative_error(after, parameter) < 1e-6
    assert broken.stats()["dropped_rounds"] == 1
    for number in range(2, 4):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_round(model, optimizer, number)
    for after, parameter in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert relative_error(after, parameter) < 1e-5
    assert other.stats()["dropped_rounds"] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("a round", "rank 1 has not begun round 1 of LocalSGD"),
        ("a sparse round", "rank 1 has not begun round 1 of LocalSGD"),
        ("sync", "rank 1 has not called LocalSGD.sync"),
        ("detach", "rank 1 has not called LocalSGD.detach"),
        ("state_dict", "rank 1 has not called state_dict"),
        ("buffers", "rank 1 has not averaged the buffers after round 0 of LocalSGD"),
    ],
)
@on_ranks(2)
def test_a_rank_that_is_absent_is_named(rank: int, call: str, message: str) -> None:
    """Instead of a bare time-out of Gloo."""
    collective_call.PATIENCE = agreement.GRACE = timedelta(seconds=0.5)
    model = nn.Sequential(make_net(), nn.BatchNorm1d(24))
    optimizer, store = sgd(model), ranks.side_store()
    density = 1 / 16 if "sparse" in call else None
    steps = tp.LocalSGD(model, optimizer, 1, OPTIONS, warmup_steps=0, density=density)
    if rank == 0:
        world().set_timeout(timedelta(seconds=1))
        backward(model, rank, 0)
        calls: dict[str, Callable[[], Any]] = {
            "a round": optimizer.step,
            "a sparse round": optimizer.step,
            "buffers": steps._rounds.average_buffers,
        }
        with pytest.raises((ValueError, dist.DistBackendError), match=message):
            (calls.get(call) or getattr(steps, call))()
        store.set("done", "1")
    store.wait(["done"])


@on_ranks(2)
def test_ranks_that_sync_in_different_ways_are_told(rank: int) -> None:
    model = make_net()
    optimizer = sgd(model)
    steps = tp.LocalSGD(
        model, optimizer, EVERY, OPTIONS, warmup_steps=0, fragment_sync_delay=EVERY - 1
    )
    with pytest.raises(ValueError, match="LocalSGD.sync must be the same .*exact is False on rank"):
        steps.sync(exact=rank == 1)
    if rank == 1:
        steps.step_skipped()  # begins a round that rank 0 has not begun
    with pytest.raises(ValueError, match="number of rounds begun is 0 on rank 0 and 1 on rank 1"):
        steps.sync()
    if rank == 0:
        steps.step_skipped()
    steps.sync()


@on_ranks(2)
def test_what_is_announced_is_what_a_round_sends(rank: int) -> None:
    """Buffers included, which weigh a thousand times more than the factors here."""
    records = LogRecords(logging.INFO)
    model = nn.Sequential(nn.BatchNorm1d(24), make_net())  # a matrix in each fragment
    model.register_buffer("table", torch.ones(250_000))
    optimizer = sgd(model)
    steps = tp.LocalSGD(model, optimizer, EVERY, OPTIONS, fragments=2, warmup_steps=1)
    for _ in range(1 + 3 * EVERY):
        steps.step_skipped()
        if steps.stats()["steps"] == 1:
            before = steps.stats()["bytes_after"]
    sent = (steps.stats()["bytes_after"] - before) / 3
    wanted = sum(p.numel() for p in model.parameters()) * 4 * EVERY / sent
    assert steps.stats()["round_ratio"] == pytest.approx(wanted, rel=1e-4)  # 4 bytes of a flag
    if rank == 0:
        assert records.matching(f"4 steps send {re.escape(size_text(round(sent)))} instead of")


@pytest.mark.parametrize("exact", [False, True])
@on_ranks(2)
def test_a_round_within_inference_mode_spoils_nothing(rank: int, exact: bool) -> None:
    """An outer optimizer would keep tensors that it can't change outside of that mode."""
    model = make_net()
    optimizer, outer = sgd(model), torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5)
    steps = tp.DiLoCo(model, optimizer, outer, EVERY, OPTIONS, warmup_steps=0)
    for i in range(3):
        for j in range(EVERY + 1):
            take_step(model, optimizer, rank, i * EVERY + j)
        with torch.inference_mode():
            steps.sync(exact)
            assert models_agree(model) is exact
            steps.load_state_dict(steps.state_dict())
            assert models_agree(model)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.Adam])
@on_ranks(2)
def test_the_end_leaves_all_as_it_was(rank: int, kind: Any) -> None:
    """The same optimizers can begin again, with another parameter and the outer momentum."""
    model = make_net()
    first = next(model.parameters()).requires_grad_(False)
    optimizer, outer = sgd(model), kind(model.parameters(), lr=0.01)
    at_first = {*outer.state}  # Adagrad's has all parameters
    for _ in range(2):
        with tp.DiLoCo(model, optimizer, outer, EVERY, OPTIONS, warmup_steps=0) as steps:
            for i in range(EVERY):
                take_step(model, optimizer, rank, i)
            steps.state_dict()
            steps.detach()
        held = outer.param_groups[0]["params"]
        assert all(p is q for p, q in zip(held, model.parameters(), strict=True))
        assert {*outer.state} == at_first | {p for p in model.parameters() if p.requires_grad}
        first.requires_grad_(True)


@on_ranks(2)
def test_one_rank_takes_a_last_step(rank: int) -> None:
    model = make_net()
    optimizer = sgd(model)
    with tp.LocalSGD(model, optimizer, EVERY, OPTIONS, warmup_steps=1):
        for i in range(1 + rank):
            take_step(model, optimizer, rank, i)
        assert not models_agree(model)
    assert models_agree(model)


@on_ranks(2)
def test_a_parameter_that_is_trained_later_is_named(rank: int) -> None:
    model = make_net()
    next(model.parameters()).requires_grad_(False)
    optimizer = sgd(model)
    tp.LocalSGD(model, optimizer, 2, OPTIONS, warmup_steps=0)
    take_step(model, optimizer, rank, 0)
    next(model.parameters()).requires_grad_(True)
    backward(model, rank, 1)
    with pytest.raises(RuntimeError, match="'0.weight' was frozen or missing when LocalSGD"):
        optimizer.step()


@pytest.mark.parametrize("counts", [True, False], ids=["from some step on", "from the start"])
@on_ranks(2)
def test_steps_of_another_optimizer_are_noticed_and_averaged_at_the_end(
    rank: int, counts: bool
) -> None:
    model, records = make_net(), LogRecords(logging.WARNING)
    counted, other = sgd(model), sgd(model)  # as after a load that has created another one
    elsewhere = sgd(make_net())
    with tp.LocalSGD(model, counted, 2, OPTIONS, warmup_steps=0):
        for i in range(30):
            backward(model, rank, i)
            # Two optimizers may share a model and take turns. Only one of them is counted.
            (counted if counts and i < 9 and i % 3 == 0 else other).step()
            elsewhere.step()
        assert not models_agree(model)
    assert models_agree(model)
    assert len(records.matching("LocalSGD does not count the last 20 steps")) == (rank == 0)


@on_ranks(2)
def test_local_steps_that_never_end_are_noticed_at_exit(rank: int) -> None:
    model, records = make_net(), LogRecords(logging.WARNING)
    optimizer = sgd(model)
    steps = tp.LocalSGD(model, optimizer, 4, OPTIONS, warmup_steps=0)
    take_step(model, optimizer, rank, 0)

    def noticed() -> int:
        records.seen.clear()
        watch.at_exit()
        return len(records.matching("LocalSGD has not ended"))

    before = noticed()
    steps.detach()
    assert noticed() == before - (rank == 0)


@on_ranks(2)
def test_arguments_that_do_not_fit_are_refused_on_every_rank(rank: int) -> None:
    model = make_net()
    mine, ddp = sgd(model), DistributedDataParallel(make_net())
    other = make_net()
    taken = sgd(other)
    first = tp.LocalSGD(other, taken, 4)
    tp.attach(ddp)
    part = torch.optim.SGD(model[0].parameters(), lr=1.0)
    third = nn.Linear(3, 1)
    local: Any = partial(tp.LocalSGD, model, mine)
    diloco: Any = partial(tp.DiLoCo, model, mine)
    by: Any = partial(tp.LocalSGD, model)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: local(0), "sync_every must be an integer >= 1, got 0"),
        (lambda: local(1.5), "sync_every must be an integer >= 1, got"),
        (lambda: local(4, fragments=3), "fragments must be a divisor of sync"),
        (lambda: local(6, fragments=6), "at most 4, the number of trainable parameters"),
        (
            lambda: local(4, fragments=2, fragment_sync_delay=4),
            "fragment_sync_delay must be less than sync_every=4, got 4",
        ),
        (lambda: local(4, warmup_steps=-1), "warmup_steps must be an integer >= 0"),
        (lambda: tp.LocalSGD(ddp, sgd(ddp), 4), "this module is attached, but local steps do"),
        (
            lambda: tp.LocalSGD(other, sgd(other), 4),
            "'0.weight' already takes local steps: call detach() on them first. To train a model "
            "with several optimizers, pass them as a list",
        ),
        (lambda: by(taken, 4), "optimizer must hold trainable parameters of the"),
        (lambda: by([mine, taken], 4), "the model, but SGD holds none of them"),
        (lambda: by([], 4), "optimizer must be a torch.optim.Optimizer or a list"),
        (lambda: by([mine, mine], 4), "must not list the same SGD twice"),
        (lambda: by(model, 4), "optimizer must be a torch.optim.Optimizer or a list of them, got"),
        (lambda: diloco(mine, 4), "outer_optimizer must be another optimizer than"),
        (lambda: diloco(part, 4), "model, but it lacks '2.weight'"),
        (lambda: diloco(None, 4), "outer_optimizer must be a torch.optim.Optimizer"),
        (lambda: tp.LocalSGD({}, mine, 4), "model must be a torch.nn.Module, got dict"),  # type: ignore[arg-type]
        (lambda: local(4, scaler="scaler"), "scaler must be a torch.amp.GradSc"),
        (lambda: local(4 + rank), "on all ranks: sync_every is 4 on rank 0 and 5 on rank 1"),
        (lambda: local(4 * (1 - rank)), "rank 1: sync_every must be an integer"),
        (lambda: local(4, {"bits": 4}), "'bits' is not an option"),
        (
            lambda: tp.LocalSGD([model, third][rank], [mine, sgd(third)][rank], 4),
            "the same model to LocalSGD, but rank 0 has '0.weight' float32 [40, 24] where "
            "rank 1 has 'weight' float32 [1, 3]",
        ),
    ]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for call, message in wrong:
        refuses(call, message)
    assert same(model.parameters(), before)
    assert not mine._optimizer_step_post_hooks
    first.detach()
    refuses(first.state_dict, "LocalSGD has ended: sync it, or save or load its state, before")
    tp.LocalSGD(other, taken, 4).detach()
    local = DistributedDataParallel(make_net())
    steps = tp.LocalSGD(local, sgd(local), 4)
    refuses(lambda: tp.attach(local), "this module takes local steps, which do their own compr")
    steps.detach()
    tp.attach(local)
