# SPDX-License-Identifier: BSD-3-Clause
"""Parses the machine code of kernels, as printed by ``cuobjdump -sass`` through ``c++filt``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nvcc_report import short

_FUNCTION = re.compile(r"\bFunction : (.*)")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"\b0x([0-9a-f]+)$")
_REGISTER = re.compile(r"\bR(\d+)\b")
_BRANCHES = {"BRA", "CALL", "JMP"}


@dataclass(frozen=True)
class Instruction:
    address: int  # in bytes
    predicate: str  # "P0", "!P0" or ""
    opcode: str  # with its modifiers, such as "LDG.E.128"
    operands: str

    def __str__(self) -> str:
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{guard}{self.opcode} {self.operands}".rstrip()

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]

    @property
    def loads(self) -> bool:
        """True if it may read global memory."""
        return self.name in {"LDG", "LD", "LDGSTS"}

    @property
    def stores(self) -> bool:
        """True if it writes global memory."""
        return self.name in {"STG", "ATOMG", "ATOM", "RED"}

    @property
    def target(self) -> int | None:
        """The address that a branch or a call goes to."""
        found = _TARGET.search(self.operands) if self.name in _BRANCHES else None
        return int(found[1], 16) if found else None

    @property
    def goes_on(self) -> bool:
        """True if the next instruction may follow. A call returns."""
        if self.name == "BRA":
            return bool(self.predicate) or "," in self.operands
        return bool(self.predicate) or self.name not in {"EXIT", "RET", "JMP", "BRX"}

    @property
    def result(self) -> range:
        """The numbers of the registers that it writes."""
        first = _REGISTER.match(self.operands)
        if first is None or self.stores or self.name in {"ST", "STS", "STL"}:
            return range(0)
        wide = {"64": 2, "WIDE": 2, "128": 4}
        width = max([wide.get(modifier, 1) for modifier in self.modifiers], default=1)
        return range(int(first[1]), int(first[1]) + width)


@dataclass(frozen=True)
class Kernel:
    name: str  # without namespaces and arguments, as in nvcc_report.py
    code: list[Instruction]

    @property
    def family(self) -> str:
        return self.name.split("<")[0].removesuffix("_kernel")

    @property
    def arguments(self) -> list[str]:
        """The template arguments."""
        return self.name.partition("<")[2].removesuffix(">").split(", ")

    @property
    def rank(self) -> int:
        """The matrix rank that it serves, or 0 if its template has none."""
        return int(self.arguments[0]) if self.arguments[0].isdigit() else 0

    def numbers(self, *patterns: str) -> list[int]:
        """The indices of the instructions whose opcode begins with one of these."""
        found = re.compile("|".join(patterns))
        return [i for i, each in enumerate(self.code) if found.match(each.opcode)]

    def first(self, *patterns: str) -> int | None:
        return next(iter(self.numbers(*patterns)), None)

    def before(self, opcode: str) -> list[int]:
        """The indices of the instructions that may run before any with this opcode has run."""
        number_of = {each.address: i for i, each in enumerate(self.code)}
        seen: set[int] = set()
        to_visit = [0]
        while to_visit:
            i = to_visit.pop()
            if i in seen or i >= len(self.code) or self.code[i].name == opcode:
                continue
            seen.add(i)
            each = self.code[i]
            if each.goes_on:
                to_visit.append(i + 1)
            if each.target in number_of:
                to_visit.append(number_of[each.target])
        return sorted(seen)

    def loops(self) -> list[range]:
        """The indices of the instructions of each loop, the shortest loop first."""
        number_of = {each.address: i for i, each in enumerate(self.code)}
        found = []
        for i, each in enumerate(self.code):
            target = each.target if each.name == "BRA" else None
            if target is not None and target in number_of and number_of[target] < i:
                found.append(range(number_of[target], i + 1))
        return sorted(found, key=len)

    def base(self, i: int) -> tuple[str, int]:
        """The registers that a load's address is relative to, and where they were last written."""
        address = re.search(r"\[(\w+[\w.+]*?)(?:\+-?0x[0-9a-f]+)?\]$", self.code[i].operands)
        assert address is not None, self.code[i]
        names = {int(number) for number in _REGISTER.findall(address[1])}
        names |= {number + 1 for number in names}  # an address is a pair of registers
        written = (j for j in range(i - 1, -1, -1) if names & set(self.code[j].result))
        return address[1], next(written, -1)


def read(lines: Iterable[str]) -> list[Kernel]:
    kernels = []
    code: list[Instruction] = []
    for line in lines:
        if found := _FUNCTION.search(line):
            code = []
            kernels.append(Kernel(short(found[1]), code))
        elif found := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = found.groups()
            code.append(Instruction(int(address, 16), predicate or "", opcode, operands))
    return kernels
