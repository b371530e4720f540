# SPDX-License-Identifier: BSD-3-Clause
"""Kills this process with SIGKILL at a given stage of its training."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from launcher import hosts

IN_STATE_DICT = "in state_dict"
ONE_BUCKET = ("while P is on its way", "while q is on its way")
# Stages for which the link is slowed down and the victim counts the bytes it sends.
AIMED = (*ONE_BUCKET, IN_STATE_DICT)
EXACT = "in an exact step, between buckets"
STAGES = (
    "in init_process_group",
    "in attach",
    "before its forward pass",
    "in backward, between buckets",
    EXACT,
    *AIMED,
    "in optimizer.step",
)


class Killer:
    """Kills this process at a stage, if the trial names that stage and this is its victim."""

    def __init__(self, stage: str, pipe: Connection) -> None:
        self.stage = stage  # "": this process is not killed
        self._pipe = pipe
        self._armed = False

    def at(self, stage: str) -> None:
        if stage == self.stage:
            self.kill()

    def kill(self, *_: Any, **__: Any) -> NoReturn:
        """Reports the time, and kills the process."""
        self._pipe.send(("fault_time", time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("the process has ended")

    def replace(self, stage: str, owner: object, name: str) -> None:
        """Makes a call of owner.name kill the process, if this is the stage."""
        if stage == self.stage:
            setattr(owner, name, self.kill)

    def after_bytes(self, stage: str, count: int) -> None:
        """Kills the process after its interface sends `count` more bytes, if this is the stage."""
        if stage == self.stage:
            limit = hosts.sent_bytes() + count

            def watch() -> None:
                while hosts.sent_bytes() < limit:
                    time.sleep(1e-3)
                self.kill()

            threading.Thread(target=watch, daemon=True).start()

    def hook(self, stage: str, register: Callable[[Callable[..., Any]], Any]) -> None:
        """Registers a hook that kills the process when called, if this is the stage."""
        if stage == self.stage and not self._armed:
            self._armed = True
            register(self.kill)
