# SPDX-License-Identifier: BSD-3-Clause
""".ci/nvcc_report.py reads what nvcc says of the kernels, and fails if a float kernel spills."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.repository import ROOT


def _kernel(name: str, architecture: int, registers: int, spilled: int = 0, smem: str = "") -> str:
    symbol = f"void powersgd::kernels::cuda::(anonymous namespace)::{name}(powersgd::Bucket, long)"
    return (
        f"ptxas info    : Compiling entry function '{symbol}' for 'sm_{architecture}'\n"
        f"ptxas info    : Function properties for {symbol}\n"
        f"    8 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers{smem}, 624 bytes cmem[0]\n"
    )


def _report(log: str) -> tuple[int, str, str]:
    program = [sys.executable, str(ROOT / ".ci" / "nvcc_report.py")]
    ended = subprocess.run(program, input=log, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


# The occupancies are those of NVIDIA's occupancy calculator for blocks of 256 threads.
@pytest.mark.parametrize(
    ("architecture", "registers", "smem", "warps"),
    [
        (90, 32, "", 64),
        (90, 33, "", 48),
        (90, 64, "", 32),
        (90, 80, "", 24),
        (90, 128, "", 16),
        (90, 129, "", 8),
        (90, 255, "", 8),
        (75, 32, "", 32),
        (120, 40, "", 48),
        (90, 32, ", 49152 bytes smem", 32),
        (80, 32, ", 49152 bytes smem", 24),
    ],
)
def test_the_warps_of_a_multiprocessor(
    architecture: int, registers: int, smem: str, warps: int
) -> None:
    status, output, _ = _report(_kernel("gram_kernel<float>", architecture, registers, smem=smem))
    assert status == 0
    assert f"{warps} / {registers} / 8 / 0\n" in output


def test_kernels_and_architectures_share_a_table() -> None:
    log = _kernel("project_kernel<4, true, float, unsigned short, float>", 90, 128)
    log += _kernel("project_kernel<4, true, float, unsigned short, float>", 80, 80)
    _, output, _ = _report(log)
    lines = output.splitlines()
    assert lines[1].split() == ["sm_80", "sm_90"]
    assert lines[2].startswith("project_kernel<4, true, float, u16, float> ")
    assert " ".join(lines[2].split()[5:]) == "24 / 80 / 8 / 0 16 / 128 / 8 / 0"
    assert lines[-1] == "sm_90: so many warps leave a block of dynamic shared memory: 16: 113 KB"


def test_kernels_that_differ_in_an_enumerator_are_apart() -> None:
    way = "(powersgd::kernels::cuda::(anonymous namespace)::Way)"
    log = _kernel(f"project_kernel<4, {way}0, float>", 90, 128)
    log += _kernel(f"project_kernel<4, {way}1, float>", 90, 64)
    _, output, _ = _report(log)
    names = [line.split("  ")[0] for line in output.splitlines()[2:4]]
    assert names == ["project_kernel<4, Way 0, float>", "project_kernel<4, Way 1, float>"]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("back_project_kernel<16, float>", 1),
        ("solve_kernel<32, float>", 1),
        ("solve_kernel<32, double>", 0),
    ],
)
def test_a_float_kernel_of_any_rank_must_not_spill(name: str, status: int) -> None:
    ended, output, said = _report(_kernel("gram_kernel<float>", 80, 64) + _kernel(name, 80, 255, 4))
    assert ended == status
    assert "8 / 255 / 8 / 8\n" in output
    assert said == (f"float kernels spill: {name} on sm_80\n" if status else "")
