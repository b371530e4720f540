# SPDX-License-Identifier: BSD-3-Clause
""".ci/nvcc_report.py reads what nvcc says of the kernels, and finds those that spill."""

from __future__ import annotations

import pytest
from programs import load

nvcc_report = load("nvcc_report")


# The occupancies are those of NVIDIA's occupancy calculator for blocks of 256 threads.
@pytest.mark.parametrize(
    ("architecture", "registers", "shared", "warps"),
    [
        (90, 32, 0, 64),
        (90, 33, 0, 48),
        (90, 128, 0, 16),
        (90, 129, 0, 8),
        (75, 32, 0, 32),
        (120, 40, 0, 48),
        (90, 32, 49152, 32),
        (80, 32, 49152, 24),
    ],
)
def test_the_warps_of_a_multiprocessor(
    architecture: int, registers: int, shared: int, warps: int
) -> None:
    kernel = nvcc_report.Kernel(registers, stack=8, spilled=0, shared=shared)
    assert kernel.warps(nvcc_report.LIMITS[architecture]) == warps


def _log(name: str, registers: int, spilled: int = 0, architecture: int = 80) -> list[str]:
    symbol = f"void powersgd::kernels::cuda::(anonymous namespace)::{name}(powersgd::Bucket, long)"
    return [
        f"ptxas info    : Compiling entry function '{symbol}' for 'sm_{architecture}'",
        f"ptxas info    : Function properties for {symbol}",
        f"    8 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads",
        f"ptxas info    : Used {registers} registers, used 1 barriers, 624 bytes cmem[0]",
    ]


def test_a_kernel_of_the_default_rank_spills_nowhere() -> None:
    names = ("solve_kernel<16, float>", "solve_kernel<32, float>")
    log = [line for name in names for line in _log(name, 80, spilled=8, architecture=120)]
    assert nvcc_report.show(nvcc_report.read(log)) == ["solve_kernel<16, float> on sm_120"]


def test_a_kernel_that_spills_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    way = "(powersgd::kernels::cuda::(anonymous namespace)::Way)"
    log = [
        *_log(f"project_kernel<4, {way}0, unsigned short>", 64),
        *_log(f"project_kernel<4, {way}1, unsigned short>", 80),
        *_log("solve_kernel<32, float>", 255, spilled=4),
    ]
    assert nvcc_report.show(nvcc_report.read(log)) == ["solve_kernel<32, float> on sm_80"]
    table = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert table[1:] == [
        "sm_80",
        "project_kernel<4, Way 0, u16> 32 / 64 / 8 / 0",
        "project_kernel<4, Way 1, u16> 24 / 80 / 8 / 0",
        "solve_kernel<32, float> 8 / 255 / 8 / 8",
        "sm_80: dynamic shared memory per block, by resident warps: "
        "8: 163 KB, 24: 53 KB, 32: 40 KB",
    ]
