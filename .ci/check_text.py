# SPDX-License-Identifier: BSD-3-Clause
"""Finds words that the project replaces by others, and long lines of Markdown and C++.

    python .ci/check_text.py [FILE ...]        default: all files that git tracks

It prints a line for each, ``file:line: found: remedy``, and then fails. Spelling is codespell's.
docs/architecture.md explains the vocabulary.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

COLUMNS = 100  # of a line of Markdown and C++
# These hold third-party text, results, and the words themselves.
EXCLUDED = r"LICENSE|docs/images/|benchmarks/results/|.*check_text\.py$|.*\.(png|svg|json)$"
# A lane is one element of a vector register, or one thread of a warp.
LANE = r"\b(Backend)?Lanes?\b|\blanes?_?\b"
HAS_LANES = r"csrc/kernels/|tests/cpp/(kernels|simt)/|benchmarks/bench_kernels\.cu$"
IN_ISE = (
    "character|equal|factor|final|general|initial|local|maxim|memor|minim|normal|optim|organ"
    "|orthogonal|parallel|prior|quant|random|real|recogn|serial|special|summar|symmetr|synchron"
    "|util|vector|visual"
)
AMERICAN = "American spelling"
# codespell knows words, not names that contain them, and few that end in -ise.
REMEDIES = {
    LANE: "channel; a lane is SIMD's alone",
    r"\bowed_?\b|\bowes\b": "residual",
    r"\bbut for\b": "except for",
    r", for (to|want of)\b": "because",
    r"\bDESIGN\b|\bthe design's\b|\boracle \d": "what is in the repository",
    r"(?i)licences?(?![a-z])|behaviour|(?<![a-z])colour|favour|neighbour|centre": AMERICAN,
    rf"(?i)({IN_ISE})is(e[drs]?|ing|ation)(?![a-z])": AMERICAN,
}


def findings(name: str, text: str) -> Iterator[str]:
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, remedy in REMEDIES.items():
            found = re.search(pattern, line)
            if found and not (pattern == LANE and re.match(HAS_LANES, name)):
                yield f"{name}:{number}: {found[0].strip()}: {remedy}"
        fenced ^= line.lstrip().startswith("```")
        shown = re.sub(r"\]\([^)]*\)|https?://\S+", "", line)  # without the targets of links
        is_text = not fenced and not line.lstrip().startswith(("|", "<img", "[!["))
        if re.search(r"\.(md|h|inl|cpp|cuh?)$", name) and is_text and len(shown) > COLUMNS:
            yield f"{name}:{number}: {len(shown)} columns: at most {COLUMNS}"


if __name__ == "__main__":
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = sys.argv[1:] or subprocess.check_output(listed, text=True).splitlines()
    files = [Path(name) for name in names if not re.match(EXCLUDED, name)]
    found = [f for p in files if p.is_file() for f in findings(str(p), p.read_text("utf-8"))]
    sys.exit("\n".join(found) or None)
