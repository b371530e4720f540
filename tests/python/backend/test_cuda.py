# SPDX-License-Identifier: BSD-3-Clause
"""A GPU gets few launches, and one backend serves it beside the CPU or Gloo."""

from __future__ import annotations

import torch

import torch_powersgd as tp
from support.cuda_ranks import WORLD_SIZE, needs_cuda, options_of, run
from support.groups import compress
from support.stages import run_stages
from support.synthetic import gradient
from support.tensors import relative_error, sum_of
from torch_powersgd._core import _C
from torch_powersgd.options import to_core

pytestmark = needs_cuda


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
