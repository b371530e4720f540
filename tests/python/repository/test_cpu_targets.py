# SPDX-License-Identifier: BSD-3-Clause
"""The files of csrc/kernels/cpu/targets compile nothing for their target that others share.

The linker keeps one copy of an inline function that several files compile. A copy for AVX-512 would
crash on another CPU. A header is therefore either in the target's namespace, or included by
targets/common.h before the target's options are in force.
"""

from pathlib import Path

from test_layering import INCLUDE

from support.repository import ROOT

CSRC = ROOT / "csrc"
TARGETS = "kernels/cpu/targets"
# They define nothing themselves.
WITHOUT_DEFINITIONS = {"kernels/cpu/simd/exact.h", "kernels/cpu/simd/instructions.h"}


def includes_of(file: Path) -> list[str]:
    return INCLUDE.findall(file.read_text())


def is_compiled_for_the_target(name: str) -> bool:
    file = CSRC / name
    if not file.is_file():
        return False
    return name in WITHOUT_DEFINITIONS or "POWERSGD_TARGET {" in file.read_text()


def included_too_late() -> set[str]:
    """The headers of the stages that are neither the target's nor included before its options."""
    before = set(includes_of(CSRC / TARGETS / "common.h"))
    late, seen, todo = set(), set(), includes_of(CSRC / TARGETS / "all_stages.inl")
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if is_compiled_for_the_target(name):
            todo += includes_of(CSRC / name)
        elif name not in before:
            late.add(name)
    return late


def test_shared_headers_come_before_the_options_of_a_target() -> None:
    assert included_too_late() == set()
    for target in ("baseline", "avx2", "avx512"):
        included = includes_of(CSRC / TARGETS / f"{target}.cpp")
        assert included == [f"{TARGETS}/common.h", f"{TARGETS}/all_stages.inl"]
