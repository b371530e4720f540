# SPDX-License-Identifier: BSD-3-Clause
"""How a rank ends itself by SIGKILL at one stage of its training."""

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
# The stages at which the link is slow and the victim counts what it sends.
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
    """Ends this process at a stage, if it is the stage of this trial and the process its victim."""

    def __init__(self, stage: str, pipe: Connection) -> None:
        self.stage = stage  # "": this process stays alive
        self._pipe = pipe
        self._armed = False

    def at(self, stage: str) -> None:
        if stage == self.stage:
            self.kill()

    def kill(self, *_: Any, **__: Any) -> NoReturn:
        """Tells the time, and ends the process."""
        self._pipe.send(("fault_time", time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("the process has ended")

    def replace(self, stage: str, owner: object, name: str) -> None:
        """Lets the call of owner.name end the process, if this is the stage."""
        if stage == self.stage:
            setattr(owner, name, self.kill)

    def after_bytes(self, stage: str, count: int) -> None:
        """Ends the process once its interface has sent so many bytes more, if this is the stage."""
        if stage == self.stage:
            limit = hosts.sent_bytes() + count

            def watch() -> None:
                while hosts.sent_bytes() < limit:
                    time.sleep(1e-3)
                self.kill()

            threading.Thread(target=watch, daemon=True).start()

    def hook(self, stage: str, register: Callable[[Callable[..., Any]], Any]) -> None:
        """Registers a hook that ends the process when it is called, if this is the stage."""
        if stage == self.stage and not self._armed:
            self._armed = True
            register(self.kill)
