# SPDX-License-Identifier: BSD-3-Clause
"""attach: its refusals, several models in a process, groups of some ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import torch_powersgd as tp
from support import ranks
from support.synthetic import (
    SHAPES,
    Arrays,
    Ledger,
    Synthetic,
    gradients,
    make_compressed,
    make_ddp,
    mean_gradients,
    outputs_of,
    relative_error,
    residuals_of,
    step,
    to_numpy,
)
from torch_powersgd import _C
from torch_powersgd.attach_checks import Proposal

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
OTHER = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=1, random_seed=3)
TOLERANCE = 1e-5  # the identity in float32, as in test_identity
MAKES_A_CUDA_STREAM = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a torch with CUDA needs a driver for DDP's mixed precision",
)


def _message(
    function: Callable[..., Any], *arguments: Any, error: type[Exception] = ValueError
) -> str:
    with pytest.raises(error) as caught:
        function(*arguments)
    return str(caught.value)


def _is_exact(ddp: DistributedDataParallel, rank: int, i: int = 0) -> bool:
    outputs, means = step(ddp, gradients(SHAPES, rank, i)), mean_gradients(SHAPES, 2, i)
    return max(relative_error(outputs[name], means[name]) for name in SHAPES) < 1e-6


def _refused(rank: int, kind: str) -> tuple[str, bool]:
    """The message of attach, and whether the module still averages exactly afterwards."""
    options = OPTIONS
    if kind == "not DDP":
        return _message(tp.attach, torch.nn.Linear(4, 4)), True
    if kind == "plain gloo":
        ddp = make_ddp(SHAPES, process_group=dist.new_group(backend="gloo"))
    elif kind == "mixed precision":
        half = torch.bfloat16
        ddp = make_ddp(SHAPES, mixed_precision=_MixedPrecision(half, half, half))
        return _message(tp.attach, ddp, options), True
    elif kind == "optimizer in backward":
        ddp = make_ddp(SHAPES)
        if rank == 1:
            _apply_optimizer_in_backward(torch.optim.SGD, [next(ddp.parameters())], {"lr": 1.0})
        return _message(tp.attach, ddp, options), True
    else:
        shapes = dict(SHAPES)
        if kind == "models" and rank == 1:
            # The shape is the same, so DDP does not see the difference.
            shapes["renamed"] = shapes.pop("tall")
            shapes["bias"], shapes["small"] = shapes.pop("bias"), shapes.pop("small")
        ddp = make_ddp(shapes)
    if kind == "python hook":
        ddp.register_comm_hook(None, allreduce_hook)
    if kind == "built-in hook":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    if kind == "no kernels":
        _C.has_kernels = lambda device: device != "cpu"  # as in a build without CUDA, for cuda
    if kind == "options" and rank == 1:
        options = OTHER
    if kind == "kernels" and rank == 1:
        _C.kernels_version = "0.0.1"
    message = _message(tp.attach, ddp, options)
    return message, kind == "models" or _is_exact(ddp, rank)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("not DDP", ["DistributedDataParallel", "Linear"]),
        ("plain gloo", ["powersgd", "gloo"]),
        pytest.param("mixed precision", ["mixed_precision"], marks=MAKES_A_CUDA_STREAM),
        ("optimizer in backward", ["rank 1", "optimizers in backward", "optimizer.step()"]),
        ("python hook", ["hook already"]),
        ("built-in hook", ["hook"]),
        ("no kernels", ["no kernels for cpu", "POWERSGD_BUILD_CUDA"]),
        ("options", ["matrix_approximation_rank", "2 on rank 0", "1 on rank 1"]),
        ("kernels", ["kernels", f"'cpu {_C.kernels_version}' on rank 0", "'cpu 0.0.1' on rank 1"]),
        ("models", ["'weights.tall' float32 [50, 9] on rank 0", "'weights.renamed' float32"]),
    ],
)
def test_refusals_say_why_on_every_rank_and_change_nothing(kind: str, parts: list[str]) -> None:
    for message, unharmed in ranks.run(2, _refused, kind):
        for part in parts:
            assert part in message, message
        assert unharmed


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cpu"), ("cuda:1", "cuda sm_86")])
def test_gpus_of_another_compute_capability_have_other_kernels(
    device: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    gradient: Any = SimpleNamespace(
        device=torch.device(device), dtype=torch.float32, shape=torch.Size([2, 3])
    )
    backend: Any = None
    proposal = Proposal(backend, tp.Options(), {"weight": gradient}, {})
    assert proposal.plain()["options"]["kernels"] == f"{kind} {_C.kernels_version}"


def _two_models(rank: int, how: str) -> tuple[list[tuple[Arrays, Arrays]], list[int]]:
    """The outputs of two models, one after the other or together."""
    first, first_compression = make_compressed(SHAPES, OPTIONS)
    second, second_compression = make_compressed(SHAPES, OTHER)
    pairs = [(gradients(SHAPES, rank, i), gradients(SHAPES, rank, -1 - i)) for i in range(5)]
    if how == "apart":
        ones = [step(first, one) for one, _ in pairs]
        twos = [step(second, two) for _, two in pairs]
        outputs = list(zip(ones, twos, strict=True))
    else:
        outputs = []
        for one, two in pairs:
            for parameter in (*first.parameters(), *second.parameters()):
                parameter.grad = None
            losses = first(one), second(two)
            if how == "one backward":
                sum(losses).backward()
            else:
                for loss in losses:
                    loss.backward()
            outputs.append((outputs_of(first), outputs_of(second)))
    used = [
        compression.stats(per_layer=True)["layers"]["weights.tall"]["rank"]
        for compression in (first_compression, second_compression)
    ]
    return [(to_numpy(a), to_numpy(b)) for a, b in outputs], used


@pytest.mark.parametrize("how", ["interleaved", "one backward"])
def test_two_models_do_not_disturb_each_other(how: str) -> None:
    apart = ranks.run(2, _two_models, "apart")
    together = ranks.run(2, _two_models, how)
    for (expected, _), (outputs, used) in zip(apart, together, strict=True):
        assert used == [2, 1]  # options per model
        for i, (wanted, mine) in enumerate(zip(expected, outputs, strict=True)):
            for k in (0, 1):
                for name in SHAPES:
                    assert (wanted[k][name] == mine[k][name]).all(), (i, k, name)
        assert (outputs[0][0]["tall"] != outputs[0][1]["tall"]).any()


def _options_of(rank: int) -> list[tp.Options]:
    """The options of a model that was given none, some fields, or all."""
    given: list[Any] = [None, {"random_seed": 7}, OTHER]
    return [make_compressed(SHAPES, options)[1].options for options in given]


def test_a_model_takes_the_groups_options_unless_it_has_its_own() -> None:
    expected = [OPTIONS, dataclasses.replace(OPTIONS, random_seed=7), OTHER]
    assert ranks.run(2, _options_of, options=OPTIONS) == [expected, expected]


def _frozen(rank: int) -> tuple[dict[str, float], set[str]]:
    shapes = {"w": (20, 30), "frozen": (30, 30), "ignored": (25, 30), "last": (40, 22)}
    module = Synthetic({name: torch.zeros(shape) for name, shape in shapes.items()})
    module.weights["frozen"].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weights.ignored"])
    ddp = DistributedDataParallel(module)
    compression = tp.attach(ddp, OPTIONS)
    for name in ("frozen", "ignored"):
        del shapes[name]
    ledger = Ledger()
    for i in range(4):
        ledger.add(step(ddp, gradients(shapes, rank, i)), mean_gradients(shapes, 2, i))
    residuals = residuals_of(compression)
    return ledger.errors(residuals), set(residuals)


def test_frozen_and_ignored_parameters_are_left_out() -> None:
    for errors, names in ranks.run(2, _frozen):
        assert names == {"w", "last"}
        assert max(errors.values()) < TOLERANCE, errors


def _subgroup(rank: int, detail: bool) -> dict[str, float]:
    """Ranks 1 and 2 of 3 train.

    Args:
        detail: torch checks every call of the group.
    """
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group([1, 2], backend="cpu:powersgd", pg_options=OPTIONS)
    if rank == 0:
        return {}
    ddp, compression = make_compressed(SHAPES, process_group=group)
    ledger = Ledger()
    for i in range(5):
        ledger.add(step(ddp, gradients(SHAPES, rank - 1, i)), mean_gradients(SHAPES, 2, i))
    assert compression.group is group
    assert tp.stats(group)["compressed_calls"] == 5
    return ledger.errors(residuals_of(compression))


@pytest.mark.parametrize("detail", [False, True])
def test_a_group_of_some_ranks(detail: bool) -> None:
    for errors in ranks.run(3, _subgroup, detail)[1:]:
        assert max(errors.values()) < TOLERANCE, errors


def _laid_out_anew(rank: int) -> tuple[str, str]:
    layer = torch.nn.Linear(24, 40, bias=False)
    ddp = DistributedDataParallel(layer)
    compression = tp.attach(ddp, OPTIONS)
    ddp(torch.ones(2, 24)).sum().backward()
    layer.weight.data = layer.weight.data.t().contiguous().t()  # DDP rebuilds its buckets next
    saving = _message(compression.state_dict, error=RuntimeError)
    return saving, _message(lambda: ddp(torch.ones(2, 24)).sum().backward(), error=RuntimeError)


def test_a_memory_layout_that_changes_after_attach_is_an_error() -> None:
    for messages in ranks.run(2, _laid_out_anew):
        for said in messages:
            assert "powersgd: the memory layout of 'weight' has changed since attach" in said
