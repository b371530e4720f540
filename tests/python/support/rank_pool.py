# SPDX-License-Identifier: BSD-3-Clause
"""Processes that stay alive between calls, for tests that make thousands of calls in seconds.

If a process dies, raises or does not answer in time, the pool ends. The next call starts another.
"""

from __future__ import annotations

import multiprocessing.connection
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from support import ranks
from support.deadline import DEADLOCK, OPERATION
from support.ranks import RankFailed

Maker = Callable[[int], Any]

_ENDED = 3600.0  # seconds after which a process prints its stack; longer than any pool lives


class RankPool:
    """Processes that each hold an object, whose methods are called on all ranks at once.

    Args:
        world_size: Number of ranks.
        make: Picklable function of the rank that makes the object.
        patience: Seconds after which a call that has not returned on all ranks counts as hung.
    """

    def __init__(self, world_size: int, make: Maker, patience: float = OPERATION) -> None:
        self._world_size, self._make, self._patience = world_size, make, patience
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder = ""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on all ranks and returns the results by rank.

        Raises:
            RankFailed: If a rank raised, died, or did not return in time.
        """
        if not self._processes:
            self._start()
            self._await_replies("the start", DEADLOCK)
        for pipe in self._pipes:
            pipe.send((method, args))
        return self._await_replies(f"{method}{args!r:.200}", self._patience)

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp()
        setup = ranks.Setup(None, None, _ENDED, _ENDED)
        for rank in range(self._world_size):
            here, there = ranks.context.Pipe()
            place = (rank, self._world_size, f"{self._folder}/store")
            process = ranks.context.Process(
                target=ranks.main, args=(there, place, setup, _serve, (there, self._make))
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _await_replies(self, call: str, patience: float) -> list[Any]:
        replies, error = self._replies(call, patience)
        if error:
            self.close()
            raise RankFailed(error)
        return replies

    def _replies(self, call: str, patience: float) -> tuple[list[Any], str]:
        replies: list[Any] = [None] * self._world_size
        waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + patience
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), left)
            if not ready:
                return replies, f"ranks {list(waiting.values())} do not return from {call}"
            for pipe in list(waiting):
                if pipe not in ready:
                    continue
                rank = waiting.pop(pipe)
                try:
                    replies[rank], error = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    code = self._processes[rank].exitcode
                    error = f"rank {rank} died with exit code {code} in {call}"
                if error:
                    return replies, error
        return replies, ""


def _serve(rank: int, pipe: Any, make: Maker) -> None:
    held = make(rank)
    pipe.send((None, ""))
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(held, method)(*args), ""))
        except BaseException:  # the parent raises it
            pipe.send((None, f"rank {rank}, {method}:\n{traceback.format_exc()}"))
