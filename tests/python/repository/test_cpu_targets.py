# SPDX-License-Identifier: BSD-3-Clause
"""The files of csrc/kernels/cpu/targets compile nothing for their target that others share.

The linker keeps one copy of an inline function that several files compile. A copy for AVX-512 would
crash on another CPU. A header is therefore either in the target's namespace, or included by
targets/common.h before the target's options are in force.
"""

from pathlib import Path

import pytest
from test_layering import INCLUDE

from support.repository import ROOT

CSRC = ROOT / "csrc"
TARGETS = "kernels/cpu/targets"
# They define nothing themselves.
WITHOUT_DEFINITIONS = {"kernels/cpu/simd/exact.h", "kernels/cpu/simd/instructions.h"}


def includes_of(file: Path) -> list[str]:
    return INCLUDE.findall(file.read_text())


def is_compiled_for_the_target(name: str, csrc: Path) -> bool:
    file = csrc / name
    if not file.is_file():
        return False
    return name in WITHOUT_DEFINITIONS or "POWERSGD_TARGET {" in file.read_text()


def included_too_late(csrc: Path) -> set[str]:
    """The headers of the stages that are neither the target's nor included before its options."""
    before = set(includes_of(csrc / TARGETS / "common.h"))
    late, seen, todo = set(), set(), includes_of(csrc / TARGETS / "all_stages.inl")
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if is_compiled_for_the_target(name, csrc):
            todo += includes_of(csrc / name)
        elif name not in before:
            late.add(name)
    return late


def test_shared_headers_come_before_the_options_of_a_target() -> None:
    assert included_too_late(CSRC) == set()
    for target in ("baseline", "avx2", "avx512"):
        included = includes_of(CSRC / TARGETS / f"{target}.cpp")
        assert included == [f"{TARGETS}/common.h", f"{TARGETS}/all_stages.inl"]


@pytest.mark.parametrize("late", ["vector", "kernels/shared/philox.h"])
def test_a_header_that_comes_too_late_is_found(tmp_path: Path, late: str) -> None:
    for name, text in {
        f"{TARGETS}/common.h": "#include <cmath>\n",
        f"{TARGETS}/all_stages.inl": '#include "kernels/cpu/project.inl"\n',
        "kernels/cpu/project.inl": f"#include <cmath>\n#include <{late}>\n"
        "namespace powersgd::kernels::cpu::POWERSGD_TARGET {\n",
        "kernels/shared/philox.h": "namespace powersgd::kernels {\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert included_too_late(tmp_path) == {late}
