# SPDX-License-Identifier: BSD-3-Clause
"""The properties of the CPU on a GPU, through NCCL (ordered by streams) and Gloo (by a thread)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import torch_powersgd as tp
from support.cuda_ranks import INNERS, WORLD_SIZE, bits, needs_cuda, options_of, run
from support.groups import compress
from support.stages import run_stages
from support.synthetic import (
    COMPRESSED,
    SHAPES,
    Arrays,
    Ledger,
    Shapes,
    Tensors,
    gradient,
    gradients,
    make_ddp,
    mean_gradients,
    reduce_in_backward,
    relative_error,
    sum_of,
    to_bytes,
)
from support.synthetic import step as cpu_step
from torch_powersgd._core import _C
from torch_powersgd.options import to_core

pytestmark = needs_cuda

STEPS = 50


def _make_compressed(
    shapes: Shapes, options: tp.Options, dtype: torch.dtype = torch.float32
) -> tuple[DistributedDataParallel, tp.Compression]:
    ddp = make_ddp(shapes, dtype, device="cuda")
    return ddp, tp.attach(ddp, options)


def _step(ddp: DistributedDataParallel, mine: Tensors) -> Tensors:
    outputs = cpu_step(ddp, {name: tensor.cuda() for name, tensor in mine.items()})
    return {name: tensor.cpu() for name, tensor in outputs.items()}


def _residuals(compression: tp.Compression) -> Tensors:
    saved = compression.state_dict()["parameters"]
    return {n.removeprefix("weights."): s["residual"].double().cpu() for n, s in saved.items()}


# Compressed at matrix rank 40, where torch does the products.
LARGE: Shapes = {"conv": (100, 7, 10, 10), "bias": (16,)}


def _attached(
    rank: int, options: tp.Options, dtype: torch.dtype, world_size: int, shapes: Shapes
) -> tuple[dict[str, float], dict[str, float], list[list[bytes]], dict[str, Any]]:
    ddp, compression = _make_compressed(shapes, options, dtype)
    ledger, digests = Ledger(), []
    for i in range(STEPS):
        outputs = _step(ddp, gradients(shapes, rank, i, dtype))
        ledger.add(outputs, mean_gradients(shapes, world_size, i, dtype))
        digests.append([bits(outputs[name]) for name in shapes])
    return ledger.errors(_residuals(compression)), ledger.errors(), digests, compression.stats()


@pytest.mark.parametrize(
    ("inner", "rank", "dtype", "world_size"),
    [
        ("auto", 1, torch.float32, 2),
        ("auto", 3, torch.bfloat16, 2),
        ("auto", 2, torch.float32, 4),
        ("auto", 40, torch.float32, 2),
        ("auto", 40, torch.bfloat16, 2),
        ("gloo", 2, torch.float32, 2),
    ],
    ids=str,
)
def test_attached_adds_up_and_replicas_are_equal(
    inner: str, rank: int, dtype: torch.dtype, world_size: int
) -> None:
    options = options_of(inner, matrix_approximation_rank=rank)
    shapes = LARGE if rank > 32 else SHAPES
    arguments = options, dtype, world_size, shapes
    results = run(_attached, *arguments, options=options, world_size=world_size)
    assert all(result[2] == results[0][2] for result in results)  # every bit, in all steps
    # As on the CPU, float32 rounds each step, and half types lose the rounding of the outputs.
    bound = 1e-5 if dtype == torch.float32 else STEPS / 4 * torch.finfo(dtype).eps / 2
    for errors, without, _, stats in results:
        assert max(errors.values()) < bound, errors
        assert min(without[name] for name in COMPRESSED if name in shapes) > bound, without
        assert stats["steps"] == STEPS
        assert stats["compressed_calls"] > 0


FLAT = {"first": (1000,), "second": (1147,)}


def _flat(rank: int) -> tuple[dict[str, float], dict[str, float]]:
    ledger = Ledger()
    for i in range(32):
        quiet = 1e-20 if i >= 8 else 1  # adds nothing, and lets the residual drain
        mine = [quiet * tensor.cuda() for tensor in gradients(FLAT, rank, i).values()]
        outputs = [tensor.cpu() for tensor in reduce_in_backward(mine)]
        means = mean_gradients(FLAT, WORLD_SIZE, i)
        ledger.add(
            dict(zip(FLAT, outputs, strict=True)),
            {name: WORLD_SIZE * quiet * mean for name, mean in means.items()},
        )
        if i == 7:
            before_drain = ledger.errors()
    return ledger.errors(), before_drain


@pytest.mark.parametrize("inner", INNERS)
def test_flat_delivers_everything(inner: str) -> None:
    options = options_of(inner, matrix_approximation_rank=4, min_numel=500)
    for errors, before_drain in run(_flat, options=options):
        assert min(before_drain.values()) > 0.1
        assert max(errors.values()) < 1e-5, errors


def _launches(layers: int, options: tp.Options) -> float:
    """The launches of a step, averaged over two later steps that do not wait for the device.

    torch's profiler would lose some: CUPTI drops the first kernels of a session on CUDA 12.6 to 13.
    """
    shapes = [[64, 48], [48]] * layers
    compressor = _C.BucketCompressor(shapes, to_core(options), torch.float32, "cuda")
    given = torch.randn(compressor.gradient_bytes // 4, device="cuda")
    for i in range(4):
        run_stages(compressor, given.clone(), i)
    gradients_of_steps = [given.clone() for _ in range(2)]
    torch.cuda.synchronize()
    before = _C.cuda_launch_count()
    torch.cuda.set_sync_debug_mode("error")
    for i, tensor in enumerate(gradients_of_steps):
        run_stages(compressor, tensor, 4 + i)
    torch.cuda.set_sync_debug_mode("default")
    return (_C.cuda_launch_count() - before) / len(gradients_of_steps)


def test_a_bucket_of_many_layers_takes_as_few_launches_as_one_of_two() -> None:
    two, many = (_launches(layers, options_of()) for layers in (2, 40))
    assert 0 < two == many <= 8


def _trajectory(rank: int, options: tp.Options, bad: bool) -> tuple[list[Arrays], int]:
    ddp, compression = _make_compressed(SHAPES, options)
    good = []
    for i in range(6):
        if bad and i == 3:
            spoilt = gradients(SHAPES, rank, "bad")
            if rank == 1:
                spoilt["wide"].view(-1)[100] = float("inf")
            assert all(output.isnan().all() for output in _step(ddp, spoilt).values())
        good.append({n: t.numpy() for n, t in _step(ddp, gradients(SHAPES, rank, i)).items()})
    return good, compression.stats()["skipped_steps"]


@pytest.mark.parametrize("inner", INNERS)
def test_a_gradient_that_is_not_finite_costs_one_step(inner: str) -> None:
    options = options_of(inner)
    expected = run(_trajectory, options, False, options=options)
    for (good, skipped), (left_out, _) in zip(
        run(_trajectory, options, True, options=options), expected, strict=True
    ):
        assert skipped == 1
        for mine, wanted in zip(good, left_out, strict=True):
            for name in SHAPES:
                error = relative_error(torch.from_numpy(mine[name]), torch.from_numpy(wanted[name]))
                assert error < 2e-5, name  # M - G is rounded once


def _state(rank: int, options: tp.Options) -> tuple[bytes, float, list[str]]:
    first, of_first = _make_compressed(SHAPES, options)
    for i in range(3):
        _step(first, gradients(SHAPES, rank, i))
    saved = of_first.state_dict()
    _second, of_second = _make_compressed(SHAPES, options)
    of_second.load_state_dict(saved)
    again = of_second.state_dict()["parameters"]
    errors = [
        relative_error(again[name]["residual"], kept["residual"])
        for name, kept in saved["parameters"].items()
    ]
    return to_bytes(saved), max(errors), sorted(again)


@pytest.mark.parametrize("inner", INNERS)
def test_the_state_is_equal_on_all_ranks_and_loads(inner: str) -> None:
    options = options_of(inner)
    (saved, error, names), (other, other_error, _) = run(_state, options, options=options)
    assert saved == other
    assert max(error, other_error) < 1e-6
    assert names == sorted(f"weights.{name}" for name in COMPRESSED)


def _both_devices(rank: int, compressed: tuple[str, ...]) -> tuple[float, int]:
    tensors = [gradient([90, 120], rank, device) for device in ("same", "same")]
    tensors[1] = tensors[1].cuda()
    exact = sum_of(gradient([90, 120], other, "same") for other in range(WORLD_SIZE))
    works = [compress(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    is_exact = [bool(torch.allclose(tensor.cpu(), exact)) for tensor in tensors]
    assert is_exact == [device not in compressed for device in ("cpu", "cuda")]
    return relative_error(tensors[1].cpu(), tensors[0]), tp.stats()["compressed_calls"]


def test_one_backend_for_the_gpu_beside_gloo_for_the_cpu() -> None:
    for _, calls in run(_both_devices, ("cuda",)):
        assert calls == 1


def test_one_backend_for_both_devices_at_once() -> None:
    options = options_of("auto")
    for error, calls in run(_both_devices, ("cpu", "cuda"), options=options, backend="powersgd"):
        assert error < 1e-4  # the same start, the same sums in another order
        assert calls == 2
