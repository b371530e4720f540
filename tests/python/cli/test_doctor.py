# SPDX-License-Identifier: BSD-3-Clause
"""powersgd doctor: what would be refused, and what is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support import command_line
from torch_powersgd._core import _C
from torch_powersgd.cli import doctor


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the variables that the report shows."""
    for name in [*os.environ]:
        if doctor.VARIABLES.fullmatch(name):
            monkeypatch.delenv(name)


def test_a_bad_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERSGD_WIRE_DTYPE", "int9")
    monkeypatch.setenv("POWERSGD_RANK", "4")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,no-such0")
    status, report = command_line.run("doctor")
    assert status == 1
    said = " ".join(report.split("\nversions\n")[0].split())
    assert said.startswith("Something is refused or fails here: 1. ")
    assert "1. No process group can be created: environment variable POWERSGD_WIRE_DTYPE: " in said
    assert "got 'int9'. Correct or unset the variable." in said
    assert "2. POWERSGD_RANK is not an option and has no effect" in said
    assert "3. GLOO_SOCKET_IFNAME names the interface no-such0" in said
    assert "4." not in said


@pytest.mark.parametrize(
    ("control", "restarts", "said"),
    [
        (
            "cubic",
            "1",
            "idle=1: after a pause of a second, a message of 200 kB takes 4 round trips",
        ),
        ("cubic", "0", "control=cubic, tcp_slow_start_after_idle=0: the window stays open"),
        ("bbr", "1", "control=bbr, tcp_slow_start_after_idle=1: the window stays open"),
    ],
)
def test_tcp_after_a_pause(
    control: str, restarts: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "TCP", tmp_path)
    assert "TCP" not in dict(doctor.sections()["network"]), "not known"
    (tmp_path / "tcp_congestion_control").write_text(control + "\n")
    (tmp_path / "tcp_slow_start_after_idle").write_text(restarts + "\n")
    shown = dict(doctor.sections()["network"])["TCP"]
    assert said in shown
    assert (doctor.SLOW_START in shown) == ("round trips" in said)


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        ("sm_80,sm_90", (8, 0), True),
        ("sm_80,sm_90", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80,sm_90", (10, 0), False),
        ("sm_80,compute_90", (10, 0), True),
        ("sm_80,compute_90", (7, 5), False),
        ("sm_100,compute_120", (12, 0), True),
        ("", (9, 0), False),
    ],
)
def test_code_runs_on_the_gpus_that_cuda_names(
    architectures: str, capability: tuple[int, int], runs: bool
) -> None:
    assert doctor.runs_on(architectures, *capability) is runs


def _with_gpu(monkeypatch: pytest.MonkeyPatch, architectures: str) -> list[str]:
    """The problems on a machine with one GPU of capability 9.0, whose kernels are not run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(_C, "has_kernels", lambda device: device == "cpu" or bool(architectures))
    monkeypatch.setattr(_C, "cuda_architectures", architectures)
    monkeypatch.setattr(doctor, "device_types", lambda: ["cpu"])
    return [str(problem) for problem in doctor.problems()]


def test_a_gpu_that_the_kernels_do_not_run_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = _with_gpu(monkeypatch, "")
    assert said.startswith("CUDA gradients are refused: this build has no CUDA kernels.")
    (said,) = _with_gpu(monkeypatch, "sm_75,sm_80")
    assert said.startswith("cuda:0 is sm_90, but the kernels were built for sm_75,sm_80.")
    assert 'TORCH_CUDA_ARCH_LIST="9.0"' in said
    assert _with_gpu(monkeypatch, "sm_80,sm_90") == []


class _Broken:
    """A compressor that leaves the gradient as it is, except for its first element."""

    def __init__(self, *_: Any) -> None:
        self.gradient = torch.empty(0)

    def project(self, gradient: torch.Tensor, _: int) -> None:
        self.gradient = gradient

    def orthogonalize(self) -> None: ...
    def back_project(self) -> None: ...

    def reconstruct(self) -> None:
        self.gradient[0] = torch.nan


class _Failing(_Broken):
    def reconstruct(self) -> None:
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (_Broken, "The kernels compute wrong numbers on cpu: a matrix of rank 1 comes back"),
        (_Failing, "The kernels fail on cpu: no kernel image is available. Rebuild"),
    ],
)
def test_kernels_that_do_not_work_are_named(
    compressor: type, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_C, "BucketCompressor", compressor)
    found = [str(problem) for problem in doctor.problems()]
    assert found
    assert found[0].startswith(message)
