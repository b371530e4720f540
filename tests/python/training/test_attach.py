# SPDX-License-Identifier: BSD-3-Clause
"""attach: its refusals, several models in a process, groups of some ranks."""

from __future__ import annotations

import inspect
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
from support.ddp import make_compressed, make_ddp, outputs_of, step, train
from support.ledger import Ledger, residuals_of
from support.on_ranks import on_ranks
from support.refusals import refuses
from support.synthetic import SHAPES, Synthetic, gradients, mean_gradients
from support.tensors import same
from torch_powersgd import _C
from torch_powersgd.proposal import Proposal

OPTIONS = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=2)
OTHER = tp.Options.hook_defaults(start_powerSGD_iter=0, matrix_approximation_rank=1, random_seed=3)
MAKES_A_CUDA_STREAM = pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="a torch with CUDA needs a driver for DDP's mixed precision",
)


@MAKES_A_CUDA_STREAM
@on_ranks(2)
def test_mixed_precision_is_refused(rank: int) -> None:
    half = torch.bfloat16
    mixed = make_ddp(SHAPES, mixed_precision=_MixedPrecision(half, half, half))
    refuses(lambda: tp.attach(mixed), "mixed_precision")


@on_ranks(2)
def test_targets_that_differ_are_refused(rank: int) -> None:
    shapes = dict(SHAPES)
    if rank == 1:
        # The shape is the same, so DDP does not see the difference.
        shapes["renamed"] = shapes.pop("tall")
        shapes["bias"], shapes["small"] = shapes.pop("bias"), shapes.pop("small")
    other, ddp = make_ddp(shapes), make_ddp(SHAPES)
    rank_0 = "rank 0 has 'weights.tall' float32 [50, 9]"
    refuses(lambda: tp.attach(other), rank_0, "'weights.renamed'")
    if rank == 1:
        _apply_optimizer_in_backward(torch.optim.SGD, [next(ddp.parameters())], {"lr": 1.0})
    refuses(lambda: tp.attach(ddp), "rank 1", "_apply_optimizer_in_backward", "optimizer.step()")
    linear: Any = torch.nn.Linear(4, 4)
    refuses(lambda: tp.attach(linear), "DistributedDataParallel", "Linear")


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("plain gloo", ["powersgd", "gloo"]),
        ("python hook", ["already has a communication hook"]),
        ("built-in hook", ["hook"]),
        ("no kernels", ["without kernels for cpu", "POWERSGD_BUILD_CUDA"]),
        ("options", ["matrix_approximation_rank", "2 on rank 0", "1 on rank 1"]),
        ("kernels", [f"rank 0 has 'cpu {_C.kernels_version}'", "rank 1 has 'cpu 0.0.1'"]),
    ],
)
@on_ranks(2)
def test_a_module_that_is_refused_still_averages_exactly(
    rank: int, kind: str, parts: list[str]
) -> None:
    group = dist.new_group(backend="gloo") if kind == "plain gloo" else None
    ddp = make_ddp(SHAPES, process_group=group)
    if kind == "python hook":
        ddp.register_comm_hook(None, allreduce_hook)
    if kind == "built-in hook":
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    if kind == "no kernels":
        _C.has_kernels = lambda device: device != "cpu"  # as in a build without CUDA, for cuda
    if kind == "kernels" and rank == 1:
        _C.kernels_version = "0.0.1"
    options = OTHER if kind == "options" and rank == 1 else OPTIONS
    refuses(lambda: tp.attach(ddp, options), *parts)
    ledger = Ledger()
    train(ddp, [0], ledger)
    assert max(ledger.errors().values()) < 1e-6


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


@on_ranks(2)
def test_keywords_are_fields_of_the_options(rank: int) -> None:
    """However the options are given. No field has the name of another argument."""
    for call in (tp.attach, tp.LocalSGD, tp.DiLoCo):
        arguments = inspect.signature(call).parameters
        assert arguments.keys().isdisjoint(vars(OTHER))
    for given in (None, {"random_seed": 3}, OTHER):
        own = tp.attach(make_ddp(SHAPES), given, matrix_approximation_rank=4).options
        wanted = {"random_seed": 3} if isinstance(given, dict) else vars(given or tp.Options())
        assert own == tp.Options(**{**wanted, "matrix_approximation_rank": 4})
    model = Synthetic(gradients(SHAPES, 0, 0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    steps = tp.LocalSGD(model, optimizer, 2, matrix_approximation_rank=4)
    assert steps._fragments[0].compression.options.matrix_approximation_rank == 4


@pytest.mark.parametrize("one_backward", [False, True])
@on_ranks(2)
def test_two_models_do_not_disturb_each_other(rank: int, one_backward: bool) -> None:
    """Trains them one after the other, and others like them together."""
    apart = [make_compressed(SHAPES, options) for options in (OPTIONS, OTHER)]
    together = [make_compressed(SHAPES, options) for options in (OPTIONS, OTHER)]
    inputs = [[gradients(SHAPES, rank, i), gradients(SHAPES, rank, -1 - i)] for i in range(5)]
    expected = [[step(ddp, pair[k]) for pair in inputs] for k, (ddp, _) in enumerate(apart)]
    for i, pair in enumerate(inputs):
        for ddp, _ in together:
            ddp.zero_grad()
        losses = [ddp(mine) for (ddp, _), mine in zip(together, pair, strict=True)]
        for loss in [sum(losses)] if one_backward else losses:
            loss.backward()
        for k, (ddp, _) in enumerate(together):
            assert same(outputs_of(ddp).values(), expected[k][i].values()), (i, k)
    layers = [c.stats(per_layer=True)["layers"]["weights.tall"] for _, c in together]
    assert [layer["rank"] for layer in layers] == [2, 1]  # options per model


@on_ranks(2)
def test_frozen_and_ignored_parameters_are_left_out(rank: int) -> None:
    shapes = {"w": (20, 30), "frozen": (30, 30), "ignored": (25, 30), "last": (40, 22)}
    module = Synthetic({name: torch.zeros(shape) for name, shape in shapes.items()})
    module.weights["frozen"].requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weights.ignored"])
    ddp = DistributedDataParallel(module)
    compression, ledger = tp.attach(ddp, OPTIONS), Ledger()
    averaged = {name: shapes[name] for name in ("w", "last")}
    for i in range(4):
        ledger.add(step(ddp, gradients(averaged, rank, i)), mean_gradients(averaged, 2, i))
    ledger.check(compression)
    assert residuals_of(compression).keys() == averaged.keys()


@pytest.mark.parametrize("detail", [False, True])
@on_ranks(3)
def test_a_group_of_some_ranks(rank: int, detail: bool) -> None:
    """Ranks 1 and 2 of 3 train. With detail, torch checks every call of the group."""
    if detail:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group([1, 2], backend="cpu:powersgd", pg_options=OPTIONS)
    if rank == 0:
        return
    ddp, compression = make_compressed(SHAPES, process_group=group)
    train(ddp, range(5), ledger := Ledger())
    ledger.check(compression)
    assert compression.group is group
    assert tp.stats(group)["compressed_calls"] == 5


@on_ranks(2)
def test_a_memory_layout_that_changes_after_attach_is_an_error(rank: int) -> None:
    layer = torch.nn.Linear(24, 40, bias=False)
    ddp = DistributedDataParallel(layer)
    compression = tp.attach(ddp, OPTIONS)
    ddp(torch.ones(2, 24)).sum().backward()
    layer.weight.data = layer.weight.data.t().contiguous().t()  # DDP rebuilds its buckets next
    for use in (compression.state_dict, lambda: ddp(torch.ones(2, 24)).sum().backward()):
        with pytest.raises(RuntimeError, match="the memory layout of 'weight' has changed since"):
            use()
