# SPDX-License-Identifier: BSD-3-Clause
""".ci/check_kernels.py finds kernels that spill, and those that do not order memory."""

from __future__ import annotations

import pytest
from programs import load

check_kernels = load("check_kernels")

SYMBOL = "void powersgd::kernels::cuda::(anonymous namespace)::{}(powersgd::kernels::Bucket, long)"
LOG = """ptxas info    : Compiling entry function '{}' for 'sm_{}'
ptxas info    : Function properties for it
    {} bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 80 registers, used 1 barriers
"""


@pytest.mark.parametrize(
    ("kernel", "architecture", "local", "is_fault"),
    [
        ("project_kernel<4, float>", 90, 8, True),
        ("project_kernel<4, float>", 90, 0, False),
        ("project_kernel<16, float>", 120, 8, True),  # of the default rank
        ("project_kernel<32, float>", 120, 8, False),
    ],
)
def test_spills(kernel: str, architecture: int, local: int, is_fault: bool) -> None:
    log = LOG.format(SYMBOL.format(kernel), architecture, local)
    fault = f"{kernel}: {local} bytes of local memory on sm_{architecture}"
    assert check_kernels.spills(log) == [fault] * is_fault


AWAIT = ["$L1:", "nanosleep.u32 %r1;", "ld.acquire.gpu.global.u64 %rd1, [%rd2];", "@%p1 bra $L1;"]
EARLY = ["ld.global.u64 %rd1, [%rd2];"] * 3 + ["@%p1 bra $L2;", "bra.uni $L3;", "$L2:"]
WAIT = ["griddepcontrol.wait;", "ld.global.f32 %f1, [%rd1];", "$L3:", "ret;"]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ([*EARLY, "st.volatile.shared.u32 [x], %r1;", "ld.global.cs.f32 %f1, [%rd1];", *WAIT], ""),
        ([*EARLY, "$L3:"], "it does not wait for its predecessor"),
        ([*EARLY, EARLY[0], *WAIT], "4 loads before the wait"),
        ([*EARLY, "st.global.u32 [%rd1], %r1;", *WAIT], "before the wait for its predecessor: st."),
        ([*WAIT, "ld.global.nc.f32 %f1, [%rd1];"], "a load by the read-only path"),
        ([*WAIT, *AWAIT, "fence.acq_rel.gpu;"], ""),
        ([*WAIT, *AWAIT], "without fence.acq_rel.gpu"),
        ([*WAIT, *AWAIT[:2], "fence.acq_rel.gpu;"], "without ld.acquire.gpu"),
    ],
)
def test_the_order_of_memory(code: list[str], fault: str) -> None:
    entry = (
        f".visible .entry {SYMBOL.format('back_project_bfloat16_kernel<16>')}(\n.param .u64 x\n)\n"
    )
    ptx = entry + "{\n\t.reg .b32 %r<4>;\n" + "\n".join(code) + "\n}\n"
    (kernel,) = check_kernels.kernels_of(ptx)
    found = [*check_kernels.early_accesses(kernel), *check_kernels.disorder(kernel)]
    assert [fault in each for each in found] == [True] * bool(fault)
