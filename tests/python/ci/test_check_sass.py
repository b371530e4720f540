# SPDX-License-Identifier: BSD-3-Clause
""".ci/check_sass.py finds the faults that machine code can have, each in a few instructions."""

from __future__ import annotations

import pytest
from programs import load

check_sass = load("check_sass")
sass = load("sass")


def _code(name: str, *instructions: str) -> str:
    """A function as cuobjdump writes it. An instruction may branch to "@N", the number of one."""
    lines = [f"\t\tFunction : void powersgd::kernels::cuda::{name}(powersgd::kernels::Bucket)\n"]
    for i, text in enumerate(instructions):
        operation, _, target = text.partition(" @")
        to = f" {int(target) * 16:#x}" if target else ""
        lines.append(
            f"        /*{i * 16:04x}*/      {operation}{to} ;   /* 0x0000000000007918 */\n"
        )
        lines.append(f"{' ' * 80}/* 0x000fc00000000000 */\n")
    return "".join(lines)


def _faults(code: str) -> str:
    """All faults that are found, as lines."""
    kernels = sass.read(code.splitlines())
    assert kernels
    found = (fault for kernel in kernels for check in check_sass.CHECKS for fault in check(kernel))
    return "\n".join(found)


LOADS_OF_G = ["LDG.E.EF.128 R20, desc[UR6][R2.64]"] * 8
STORES_OF_M = ["STG.E.128.STRONG.SM desc[UR6][R2.64], R20"] * 4
PROJECT = [*LOADS_OF_G, *STORES_OF_M, "@P0 BRA @0", "EXIT"]

TABLES = [
    "LDC.64 R2, c[0x0][0x220]",
    "LDG.E.64 R6, desc[UR4][R2.64+0x8]",
    "LDG.E R7, desc[UR4][R2.64+0x4]",
    "IMAD.WIDE R4, R7, 0x70, R4",
    "LDG.E.64 R10, desc[UR4][R4.64+0x30]",
]
M_AND_WAIT = ["LDG.E.EF.128 R20, desc[UR4][R10.64]", "ACQBULK"]
LOOPS_OF_M = [
    *(["LDG.E.EF.128 R20, desc[UR4][R10.64]"] * 4),
    "@P0 BRA @{128}",
    *(["LDG.E.EF.64 R20, desc[UR4][R10.64]"] * 4),
    "@P0 BRA @{64}",
    "EXIT",
]


def _back_project(*before_wait: str) -> str:
    start = [*TABLES, *before_wait, *M_AND_WAIT]
    loops = [
        each.replace("{128}", str(len(start))).replace("{64}", str(len(start) + 5))
        for each in LOOPS_OF_M
    ]
    return _code("back_project_kernel<4>", *start, *loops)


TICKET = "ATOMG.E.ADD.64.STRONG.GPU PT, R4, desc[UR8][R2.64], R4"
NEXT_LAUNCH = "ATOMG.E.ADD.64.STRONG.GPU PT, RZ, desc[UR8][R2.64], R4"
POST = "ATOMG.E.ADD.64.STRONG.GPU PT, RZ, desc[UR8][R2.64+0x8], R4"
ACQUIRE = "LDG.E.64.STRONG.GPU R6, desc[UR8][R2.64+0x8]"
AWAIT = [ACQUIRE, "CCTL.IVALL", "@P0 BRA @9", "NANOSLEEP 0x20", ACQUIRE, "CCTL.IVALL", "@P1 BRA @5"]
FENCE = ["MEMBAR.SC.GPU", "ERRBAR", "CGAERRBAR", "CCTL.IVALL"]
BARRIER = "BAR.SYNC.DEFER_BLOCKING 0x0"
ORTHOGONALIZE = [TICKET, NEXT_LAUNCH, *AWAIT, BARRIER, "PREEXIT", *FENCE, POST, "EXIT"]

# Each has no fault.
SOUND = {
    "project": _code("project_kernel<4, Way 1, float, float, float>", *PROJECT),
    "back_project": _back_project(),
    "orthogonalize": _code("orthogonalize_kernel<4, float>", *ORTHOGONALIZE),
    "reconstruct": _code(
        "reconstruct_kernel<4, float>",
        *(TICKET, *FENCE, POST, *AWAIT[:2]),
        *("STG.E.EF.128 desc[UR8][R2.64], R20", "@P0 BRA @8", "EXIT"),
    ),
    # It loads late, and stores single elements.
    "project without products": _code(
        "project_kernel<0, Way 0, float, float, float>",
        *(*["NOP"] * 200, "LDG.E.EF R4, desc[UR6][R2.64]", "STG.E desc[UR6][R2.64], R4", "EXIT"),
    ),
}


@pytest.mark.parametrize("family", SOUND)
def test_sound_code_passes(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _faults(SOUND[family]) == ""
    check_sass.show(sass.read(SOUND[family].splitlines()))
    assert f"\n{family.split()[0]} " in capsys.readouterr().out


def _orthogonalize(code: list[str]) -> str:
    return _code("orthogonalize_kernel<4, float>", *code)


def _without(code: list[str], *numbers: int) -> list[str]:
    return [each for i, each in enumerate(code) if i not in numbers]


PROJECT_NAME = "project_kernel<4, Way 1, float, float, float>"
ARRIVAL = [*FENCE, TICKET]
FAULTS = {
    "a load by the read-only path": _code(
        PROJECT_NAME, *PROJECT[:-1], "LDG.E.128.CONSTANT R4, desc[UR6][R2.64]", "EXIT"
    ),
    "it does not wait for its predecessor": _back_project().replace("ACQBULK", "NOP"),
    "from 3 places, not 2": _back_project(
        "LDC.64 R12, c[0x0][0x288]", "LDG.E R12, desc[UR4][R12.64+0x8]"
    ),
    "1 more LDG.E.EF before the wait": _back_project("LDG.E.EF R12, desc[UR4][R12.64]"),
    "STG.E desc[UR4][R2.64], R7: before the wait": _back_project("STG.E desc[UR4][R2.64], R7"),
    "without CCTL.IVALL after it": _orthogonalize(_without(ORTHOGONALIZE, 3)),
    "a wait without an acquire load": _orthogonalize(
        [*ORTHOGONALIZE[:6], "LDG.E.64 R6, desc[UR8][R2.64+0x8]", *ORTHOGONALIZE[7:]]
    ),
    "it never waits for another block": _orthogonalize([TICKET, *FENCE, POST, "PREEXIT", "EXIT"]),
    "a count without a fence before it": _orthogonalize(_without(ORTHOGONALIZE, 11, 12, 13, 14)),
    "an arrival without a fence after it": _code(
        PROJECT_NAME, *PROJECT[:-1], *ARRIVAL, "LDG.E R4, desc[UR6][R2.64]", "EXIT"
    ),
    "3 STG.E.128 in its loop, not 4": _code(
        PROJECT_NAME, *LOADS_OF_G, "STG.E desc[UR6][R2.64], R20", *STORES_OF_M[1:], *PROJECT[12:]
    ),
    "1 accesses to local memory": _code(PROJECT_NAME, *PROJECT[:-1], "LDL R4, [R1+0x8]", "EXIT"),
    "PREEXIT at instruction 0, before it has waited (at 3)": _orthogonalize(
        ["PREEXIT", *_without(ORTHOGONALIZE, 10)]
    ),
    "its first load of G is instruction 121": _code(PROJECT_NAME, *["NOP"] * 121, *PROJECT),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    assert fault in _faults(FAULTS[fault])


# A branch around the wait goes to the load that follows the wait, or to the end.
@pytest.mark.parametrize(("target", "is_early"), [(8, True), (20, False)])
def test_what_runs_before_the_wait_follows_from_the_branches(target: int, is_early: bool) -> None:
    load = ["LDC.64 R12, c[0x0][0x288]", "LDG.E R12, desc[UR4][R12.64+0x8]"]
    loops = [each.replace("{128}", "10").replace("{64}", "15") for each in LOOPS_OF_M]
    code = [*TABLES, f"@P0 BRA @{target}", *M_AND_WAIT, *load, *loops]
    found = _faults(_code("back_project_kernel<4>", *code))
    assert ("from 3 places, not 2" in found) == is_early == bool(found)
