# SPDX-License-Identifier: BSD-3-Clause
"""The package's logger, ``"torch_powersgd"``.

Unless the program configures logging, Python shows warnings without their origin and hides lower
levels. These functions then write to stderr, with the package's name in front.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import torch.distributed as dist

_logger = logging.getLogger("torch_powersgd")


@dataclass(frozen=True)
class Log:
    """The logger on a process that speaks, and silence on others."""

    speaks: bool = True

    def info(self, message: str) -> None:
        """Logs a message that only a program with its own logging shows."""
        if self.speaks:
            _logger.info(message)

    def notice(self, message: str) -> None:
        """Logs a message at level INFO that every user must see."""
        self._show(logging.INFO, message)

    def warning(self, message: str) -> None:
        """Logs a message that a user should act on."""
        self._show(logging.WARNING, message)

    def _show(self, level: int, message: str) -> None:
        if not self.speaks:
            return
        if _logger.hasHandlers():
            _logger.log(level, message)
        elif _logger.isEnabledFor(max(level, logging.WARNING)):
            print(f"torch_powersgd: {message}", file=sys.stderr, flush=True)


def of(group: dist.ProcessGroup, shard: str = "") -> Log:
    """Returns a log on which only the first process of a group speaks.

    Args:
        group: The group.
        shard: Name of the shard that the group averages, such as "shard 1 of 2", if others average
            the rest. The group of the first shard speaks for all.
    """
    return Log(group.rank() == 0 and (not shard or shard.startswith("shard 0 ")))


_here = Log()
info, notice, warning = _here.info, _here.notice, _here.warning
