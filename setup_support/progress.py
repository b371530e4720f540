# SPDX-License-Identifier: BSD-3-Clause
"""Makes the progress lines of a build readable."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

_COMMAND = re.compile(r"^(\[\d+/\d+\]) .* -c '?(.+?)'? -o ")


def shortened(line: str, root: Path) -> str:
    """`[3/45] csrc/core/plan.cpp` instead of a ninja command. Other lines stay as they are."""
    match = _COMMAND.match(line)
    if match is None:
        return line
    return f"{match[1]} {match[2].removeprefix(f'{root}/')}\n"


@contextlib.contextmanager
def short_commands(root: Path) -> Iterator[None]:
    """Shortens what this process and its children write to standard output in a ``with`` block.

    torch makes ninja print every command in full, of 2,000 characters each, straight to file
    descriptor 1.
    """
    sys.stdout.flush()
    reading, writing = os.pipe()
    screen = os.dup(1)
    os.dup2(writing, 1)
    os.close(writing)

    def copy() -> None:
        with open(reading, errors="replace") as lines, open(screen, "w") as output:
            for line in lines:
                output.write(shortened(line, root))
                output.flush()

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(screen, 1)  # closes the last write end except the children's, so copy ends
        thread.join()
