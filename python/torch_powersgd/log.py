# SPDX-License-Identifier: BSD-3-Clause
"""The package's logger, ``"torch_powersgd"``.

Unless the program configures logging, Python shows warnings without their origin and hides lower
levels. These functions then write to stderr, with the package's name in front.
"""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("torch_powersgd")


def info(message: str) -> None:
    """Logs a message that only a program with its own logging shows."""
    _logger.info(message)


def notice(message: str) -> None:
    """Logs a message at level INFO that every user must see."""
    _show(logging.INFO, message)


def warning(message: str) -> None:
    """Logs a message that a user should act on."""
    _show(logging.WARNING, message)


def _show(level: int, message: str) -> None:
    if _logger.hasHandlers():
        _logger.log(level, message)
    elif _logger.isEnabledFor(max(level, logging.WARNING)):
        print(f"torch_powersgd: {message}", file=sys.stderr, flush=True)
