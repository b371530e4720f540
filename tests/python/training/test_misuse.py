# SPDX-License-Identifier: BSD-3-Clause
"""The first rank warns if an optimizer applies gradients that were not averaged over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.log_records import LogRecords
from support.on_ranks import on_ranks
from support.states import without_checksums
from torch_powersgd.targets.misuse import INTERVAL

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=2)
DRIFT = "the gradients of Sequential were not averaged in 20 optimizer steps"
MISSED = "DDP does not average the gradients of"
EARLY = "an optimizer of Sequential steps within the backward pass"
LONG = 2 * INTERVAL + 5


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 3))


def _compressed(
    net: nn.Module, **ddp_arguments: Any
) -> tuple[DistributedDataParallel, tp.Compression]:
    ddp = DistributedDataParallel(net, **ddp_arguments)
    return ddp, tp.attach(ddp, OPTIONS)


def _attached(net: nn.Module, **ddp_arguments: Any) -> DistributedDataParallel:
    return _compressed(net, **ddp_arguments)[0]


def _train(forward: Any, optimizer: torch.optim.Optimizer, steps: int = LONG) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        forward(torch.randn(8, 6)).square().sum().backward()
        optimizer.step()


def _sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=1e-4)


def _the_inner_module_is_trained() -> None:
    ddp = _attached(_net())
    _train(ddp.module, _sgd(ddp))


def _the_inner_module_is_trained_from_a_checkpoint_on() -> None:
    ddp, compression = _compressed(_net())
    state = without_checksums(compression.state_dict())
    compression.load_state_dict({**state, "step": 40})
    _train(ddp.module, _sgd(ddp))


def _some_steps_without_an_average() -> None:
    ddp = _attached(_net())
    optimizer = _sgd(ddp)
    with ddp.no_sync():
        _train(ddp, optimizer, INTERVAL - 1)
    _train(ddp, optimizer)


def _plain_training() -> None:
    ddp = _attached(_net())
    _train(ddp, _sgd(ddp))


def _many_optimizers() -> None:
    """As with an optimizer for each parameter, of which one pass makes many steps."""
    ddp = _attached(nn.Sequential(*(nn.Linear(6, 6) for _ in range(INTERVAL))))
    optimizers = [torch.optim.SGD([parameter], lr=1e-4) for parameter in ddp.parameters()]
    for _ in range(3):
        ddp(torch.randn(8, 6)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _in_the_backward_pass() -> None:
    """As torch's tutorial on fusing the optimizer's step into the backward pass."""
    ddp = _attached(_net())
    of = {parameter: torch.optim.SGD([parameter], lr=1e-4) for parameter in ddp.parameters()}
    for parameter in of:
        parameter.register_post_accumulate_grad_hook(lambda parameter: of[parameter].step())
    for _ in range(3):
        ddp(torch.randn(8, 6)).sum().backward()
        ddp.zero_grad()


def _detached() -> None:
    ddp, compression = _compressed(_net())
    compression.detach()
    _train(ddp.module, _sgd(ddp))


def _the_optimizer_of_another_module() -> None:
    attached = _attached(_net())
    other = _net()
    _train(other, _sgd(other))
    del attached  # Without a name its check would have ended before.


def _unfrozen_before_attach() -> None:
    net = _net()
    net[2].requires_grad_(False)
    ddp = DistributedDataParallel(net)
    net[2].requires_grad_(True)
    tp.attach(ddp, OPTIONS)
    _train(ddp, _sgd(ddp))


def _unfrozen_after_attach() -> None:
    net = _net()
    net[2].requires_grad_(False)
    ddp = _attached(net)
    _train(ddp, _sgd(ddp), 3)
    net[2].requires_grad_(True)
    _train(ddp, _sgd(ddp))


def _replaced() -> None:
    net = _net()
    ddp = _attached(net, find_unused_parameters=True)
    net[3] = nn.Linear(4, 3)
    _train(ddp, _sgd(ddp))


def _frozen_again() -> None:
    """A parameter that keeps a gradient from before."""
    net = _net()
    ddp = _attached(net, find_unused_parameters=True)
    _train(ddp, _sgd(ddp), 3)
    net[2].requires_grad_(False)
    _train(ddp, _sgd(ddp))


def _ignored() -> None:
    net = _net()
    ignored = ["2.weight", "2.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ignored)
    ddp = _attached(net)
    _train(ddp, _sgd(ddp))


def _delayed() -> None:
    net = _net()
    ddp = _attached(
        net,
        delay_all_reduce_named_params=[("0.weight", net[0].weight), ("0.bias", net[0].bias)],
        param_to_hook_all_reduce=net[3].weight,
    )
    _train(ddp, _sgd(ddp))


def _frozen_before_attach() -> None:
    net = _net()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    net[2].requires_grad_(False)
    tp.attach(ddp, OPTIONS)
    _train(ddp, _sgd(ddp), 5)
    net[2].requires_grad_(True)
    _train(ddp, _sgd(ddp))


def _unfrozen_and_wrapped_anew() -> None:
    """The old wrapper lives on, and knows nothing of the parameters that are trained now."""
    net = _net()
    net[2].requires_grad_(False)
    old, compression = _compressed(net)
    _train(old, _sgd(old), 5)
    net[2].requires_grad_(True)
    state = compression.state_dict()
    new, compression = _compressed(net)
    compression.load_state_dict(state)
    _train(new, _sgd(new))


def _converted_and_wrapped_anew() -> None:
    old = _attached(_net())
    _train(old, _sgd(old), 2)
    new = _attached(old.module.to(torch.bfloat16))
    _train(lambda x: new(x.bfloat16()), _sgd(new))


def _converted_and_trained_alone() -> None:
    ddp = _attached(_net())
    _train(ddp, _sgd(ddp), 5)
    module = ddp.module.double()
    _train(lambda x: module(x.double()), _sgd(module))


def _compiled_step() -> None:
    ddp = _attached(_net())
    optimizer = _sgd(ddp)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        ddp(torch.randn(8, 6)).sum().backward()
        step()


# The jobs, and the beginning of the warning, which is empty where the job is right.
JOBS: dict[Callable[[], None], str] = {
    _the_inner_module_is_trained: DRIFT,
    _the_inner_module_is_trained_from_a_checkpoint_on: DRIFT,
    _some_steps_without_an_average: "",
    _plain_training: "",
    _many_optimizers: "",
    _in_the_backward_pass: EARLY,
    _detached: "",
    _the_optimizer_of_another_module: "",
    _unfrozen_before_attach: f"{MISSED} '2.weight', '2.bias', so the",
    _unfrozen_after_attach: f"{MISSED} '2.weight', '2.bias', so the",
    _replaced: f"{MISSED} '3.weight', '3.bias', so the",
    _frozen_again: "",
    _ignored: "",
    _delayed: "",
    _frozen_before_attach: "",
    _unfrozen_and_wrapped_anew: "",
    _converted_and_wrapped_anew: "",
    _converted_and_trained_alone: "",
    _compiled_step: "",
}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__.lstrip("_"))
@on_ranks(2)
def test_a_warning_once_where_ranks_drift(rank: int, job: Callable[[], None]) -> None:
    records = LogRecords(logging.WARNING)
    job()
    expected = [JOBS[job]] if JOBS[job] and rank == 0 else []  # one rank speaks
    assert [message[: len(JOBS[job])] for _, message in records.seen] == expected


# By the step before which the module is converted; 0 is right after attach.
CONVERSIONS: list[tuple[int, Callable[[DistributedDataParallel], torch.nn.Module]]] = [
    (step, convert)
    for step in (0, 1, 3)
    for convert in (
        lambda ddp: ddp.double(),
        lambda ddp: ddp.module.to(torch.bfloat16),
        lambda ddp: ddp.half().float(),  # DDP's hook does not come back
    )
]


@on_ranks(2)
def test_a_converted_module_is_an_error_on_every_rank(rank: int) -> None:
    for before, convert in CONVERSIONS:
        ddp = _attached(_net())
        optimizer = _sgd(ddp)
        _train(ddp, optimizer, before)
        dtype = next(convert(ddp).parameters()).dtype
        kept = [parameter.clone() for parameter in ddp.parameters()]
        with pytest.raises(RuntimeError, match="'0.weight' was converted to another dtype"):
            _train(lambda x, ddp=ddp, dtype=dtype: ddp(x.to(dtype)), optimizer, 1)
        assert all(a.equal(b) for a, b in zip(kept, ddp.parameters(), strict=True))
    ddp = DistributedDataParallel(_net()).double()
    with pytest.raises(ValueError, match="'0.weight' was converted"):
        tp.attach(ddp)
