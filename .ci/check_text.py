# SPDX-License-Identifier: BSD-3-Clause
"""Checks the wording of all text files, and the line lengths of Markdown and C++.

    python .ci/check_text.py [FILE ...]        default: all files that git tracks

It prints one line for each finding, ``file:line: found: remedy``, and fails if there are any.
Spelling is codespell's. The vocabulary is explained in docs/architecture.md.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = 100  # of a line of Markdown and C++

CPP = r".*\.(h|inl|cpp|cu|cuh)$"
CODE = r".*(\.(h|inl|cpp|cu|cuh|py|pyi|toml|cmake|sh|yml)|Makefile|CMakeLists\.txt|\.ci/\w+)$"
ANY = r".*"
# These hold third-party text, results, and the rules themselves.
EXCLUDED = (
    r"LICENSE|docs/images/|benchmarks/results/|\.ci/check_text\.py|.*/test_check_text\.py"
    r"|.*\.(png|svg|json)$"
)
# A lane is one element of a vector register, or one thread of a warp.
LANES = r"csrc/kernels/|tests/cpp/kernels/|tests/cpp/simt|benchmarks/bench_kernels\.cu"
STEMS = (
    "character|equal|factor|final|general|initial|local|maxim|memor|minim|normal|optim|organ"
    "|orthogonal|parallel|prior|quant|random|real|recogn|serial|special|summar|symmetr|synchron"
    "|util|vector|visual"
)


@dataclass(frozen=True)
class Rule:
    """Words to avoid.

    Attributes:
        pattern: the expression that finds them.
        remedy: the better words.
        where: the paths that the rule applies to.
        apart: the paths that it excludes.
    """

    pattern: str
    remedy: str
    where: str = CODE
    apart: str = r"$^"


RULES = [
    # One word, one meaning.
    Rule(r"\bowed_?\b|\bowes\b", "residual", where=ANY),
    Rule(
        r"\b(Backend)?Lanes?\b|\blanes?_?\b",
        "channel; a lane is SIMD's alone",
        where=ANY,
        apart=LANES,
    ),
    # Language.
    Rule(r"\bbut for\b", "except for", where=ANY),
    Rule(r", for (to|want of)\b", "because", where=ANY),
    # Comments cite what a reader can open.
    Rule(r"\bDESIGN\b|\bthe design's\b|\boracle \d", "what is in the repository", where=ANY),
    # codespell knows words, not names that contain them, and few that end in -ise.
    Rule(
        r"(?i)licences?(?![a-z])|behaviour|(?<![a-z])colour|favour|neighbour|centre",
        "American spelling",
        where=ANY,
    ),
    Rule(rf"(?i)({STEMS})is(e[drs]?|ing|ation)(?![a-z])", "American spelling: -ize", where=ANY),
]


@dataclass(frozen=True)
class Finding:
    place: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.place}: {self.found.strip()}: {self.remedy}"


def words_of(path: str, text: str) -> Iterator[Finding]:
    """The words to avoid in a file at this path."""
    rules = [r for r in RULES if re.match(r.where, path) and not re.match(r.apart, path)]
    for number, line in enumerate(text.splitlines(), start=1):
        for rule in rules:
            if match := re.search(rule.pattern, line):
                yield Finding(f"{path}:{number}", match[0], rule.remedy)


def long_lines_of(path: str, text: str) -> Iterator[Finding]:
    """The lines that are too long, ignoring code, tables, pictures and the targets of links."""
    fence = ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r" *(```+|~~~+)", line)
        if mark:
            fence = mark[1] if not fence else "" if mark[1] == fence else fence
        shown = re.sub(r"\]\([^)]*\)|https?://\S+", "", line)
        free = fence or line.lstrip().startswith(("|", "<img", "[!["))
        if len(shown) > COLUMNS and not free:
            yield Finding(f"{path}:{number}", f"{len(shown)} columns", f"at most {COLUMNS}")


def findings_of(path: str, text: str) -> list[Finding]:
    found = list(words_of(path, text))
    if path.endswith(".md") or re.match(CPP, path):
        found += long_lines_of(path, text)
    return found


def tracked_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


def main(arguments: list[str]) -> int:
    found = []
    for name in arguments or tracked_files():
        path = ROOT / name
        if path.is_file() and not re.match(EXCLUDED, name):
            found += findings_of(name, path.read_text(encoding="utf-8"))
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
