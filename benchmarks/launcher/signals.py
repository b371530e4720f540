# SPDX-License-Identifier: BSD-3-Clause
"""Handles the signals that end a process, so that no hosts are left behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def unwind_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise an exception, as SIGINT does, so that finally clauses run."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays signals that end the process until the body is done."""
    # A signal mask would only cover this thread, and libraries start others.
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
