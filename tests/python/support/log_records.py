# SPDX-License-Identifier: BSD-3-Clause
"""Keeps the records of the logger "torch_powersgd"."""

from __future__ import annotations

import logging
import re


class LogRecords(logging.Handler):
    """Keeps records of this level and above, from its construction until the process exits."""

    def __init__(self, level: int = logging.DEBUG) -> None:
        super().__init__(level)
        self.seen: list[tuple[str, str]] = []  # level and message
        self.threads: set[int | None] = set()
        logger = logging.getLogger("torch_powersgd")
        logger.setLevel(level)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, record.getMessage()))
        self.threads.add(record.thread)

    def matching(self, pattern: str) -> list[tuple[str, re.Match[str]]]:
        """The level and the match of each record that the pattern matches."""
        found = [(level, re.search(pattern, message)) for level, message in self.seen]
        return [(level, match) for level, match in found if match]
