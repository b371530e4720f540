# SPDX-License-Identifier: BSD-3-Clause
"""Starts ranks, a process for each: local ones, or one on each of some hosts.

A server that has imported torch forks them, which saves each start some seconds. The ranks end when
the server does, and it ends with this process, however that ends.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from groups import default_group
from process import available_memory

from launcher import hosts
from launcher.signals import uninterrupted

LEAST_MEMORY = 3 << 29  # bytes that stay free; ranks that take more are ended

_context = multiprocessing.get_context("forkserver")
# The error line of Python and of C++. Only stacks are printed after it.
_ERROR = re.compile(r"(Error|Exception): |what\(\):")
_EXIT_SECONDS = 20  # for ranks whose pipe is closed to end by themselves
_GRACE_SECONDS = 5  # for the last words of the other ranks once one has failed


def preload(*modules: str) -> None:
    """Lets the server import these modules too, if it has not been started yet.

    It leaves torch_powersgd to the ranks, which may have different ones.
    """
    _context.set_forkserver_preload(["torch._dynamo", "torch.nn.parallel", *modules])


preload()


@dataclass(frozen=True)
class Rank:
    """What a rank knows of its start.

    Attributes:
        number: its number.
        world: the number of ranks.
        folder: a folder that the ranks of a start share.
        pipe: its end of the pipe to the process that has started it.
    """

    number: int
    world: int
    folder: Path
    pipe: Connection

    def group(
        self, backend: str, seconds: float, options: Any = None
    ) -> AbstractContextManager[None]:
        """A block with a default group of all ranks, whose time-out is so many seconds."""
        return default_group(
            backend,
            store=dist.FileStore(str(self.folder / "store"), self.world),
            rank=self.number,
            world_size=self.world,
            timeout=timedelta(seconds=seconds),
            pg_options=options,
        )


class Ranks:
    """Ranks that each call function(rank, *args), where rank is a `Rank`.

    They are started with the object. At the end of a with block their pipes are closed, by which
    they can end by themselves; after an exception, or some seconds, they are killed. `processes`
    and `pipes` are by the number of a rank.

    Args:
        function: the function to call. Its result, which is JSON, is what `result` returns.
        where: the number of local ranks, or the hosts, each of which gets one.
        args: further arguments of the function.
        variables: what the ranks' environment has besides this process's.
        packages: a folder in which the ranks look for modules first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        where: int | hosts.Hosts,
        *args: Any,
        variables: Mapping[str, str] | None = None,
        packages: Path | None = None,
    ) -> None:
        namespaces = [""] * where if isinstance(where, int) else where.names
        self.folder = Path(tempfile.mkdtemp(prefix=f"{hosts.owner()}-"))
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        for number, namespace in enumerate(namespaces):
            pipe, far_end = _context.Pipe()
            rank = Rank(number, len(namespaces), self.folder, far_end)
            call = (rank, namespace, variables or {}, function, args)
            self.processes.append(_context.Process(target=_run, args=call, daemon=True))
            self.pipes.append(pipe)
            with uninterrupted(), _first_on_path(packages):
                self.processes[-1].start()
            far_end.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        if kind is None:
            # A client of MPS that is killed can take the others with it.
            self.wait(_EXIT_SECONDS)
        with uninterrupted():
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def running(self) -> list[Any]:
        return [process for process in self.processes if process.exitcode is None]

    @property
    def failed(self) -> bool:
        return any(process.exitcode for process in self.processes)

    def wait(self, seconds: float) -> None:
        """Waits so many seconds, or until all ranks have ended."""
        deadline = time.monotonic() + seconds
        while (running := self.running) and (left := deadline - time.monotonic()) > 0:
            connection.wait([process.sentinel for process in running], left)

    def result(self, number: int) -> Any:
        """What a rank that has ended has returned."""
        return json.loads((self.folder / f"result{number}").read_text())

    def complaints(self) -> str:
        """The errors of the failed ranks, without repetition."""
        self.wait(_GRACE_SECONDS)
        said = {}
        for number, process in enumerate(self.processes):
            if process.exitcode:
                log = (self.folder / f"log{number}").read_text(errors="replace")
                lines = [line.strip() for line in log.splitlines() if line.strip()]
                lines = [line for line in lines if _ERROR.search(line)] or lines
                said[lines[-1] if lines else f"a rank ended with {process.exitcode}, silently"] = 0
        return "; ".join(said)

    def log_of_failed(self) -> str:
        """What the first rank that has failed has printed last."""
        number = next(i for i, process in enumerate(self.processes) if process.exitcode)
        return (self.folder / f"log{number}").read_text(errors="replace")[-3000:]

    def keep_logs(self, folder: Path | None, name: str) -> None:
        """Copies what the ranks have printed, if there is a folder for it."""
        if folder is not None:
            (folder / name).mkdir(parents=True, exist_ok=True)
            for log in self.folder.glob("log*"):
                shutil.copy(log, folder / name)


def call(
    function: Callable[..., Any],
    where: int | hosts.Hosts,
    *args: Any,
    what: str,
    seconds: float,
    variables: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls function(rank, *args) on every rank, as `Ranks` does. Returns all results, by rank.

    Args:
        function, where, args, variables: those of `Ranks`.
        what: the name of the run, for errors.
        seconds: the time after which the ranks are ended.

    Raises:
        RuntimeError: if a rank fails, with the error of that rank.
        TimeoutError: if the ranks do not end in time.
        MemoryError: if the machine is about to run out of memory.
    """
    deadline = time.monotonic() + seconds
    with Ranks(function, where, *args, variables=variables) as ranks:
        while running := ranks.running:
            connection.wait([process.sentinel for process in running], timeout=1)
            if ranks.failed:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not end within {seconds:g} s")
            if available_memory() < LEAST_MEMORY:
                raise MemoryError(f"{what} leaves less than {LEAST_MEMORY >> 20} MiB of memory")
        if ranks.failed:
            raise RuntimeError(f"{what}: {ranks.complaints()}\n{ranks.log_of_failed()}")
        return [ranks.result(number) for number in range(len(ranks.processes))]


@contextmanager
def _first_on_path(folder: Path | None) -> Iterator[None]:
    """Processes that start meanwhile take over this process's sys.path."""
    before = sys.path[:]
    sys.path[:0] = [str(folder.resolve())] if folder else []
    yield
    sys.path[:] = before


def _run(
    rank: Rank,
    namespace: str,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Runs a rank, in a session of its own, so that Ctrl-C reaches the parent alone."""
    os.setsid()
    _die_with_parent()
    with (rank.folder / f"log{rank.number}").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    if namespace:
        hosts.enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = hosts.INTERFACE
        os.environ["NCCL_IB_DISABLE"] = "1"
        os.environ["NCCL_HOSTID"] = str(rank.number)  # or NCCL refuses two ranks on a GPU
    result = function(rank, *args)
    (rank.folder / f"result{rank.number}").write_text(json.dumps(result))


def _die_with_parent() -> None:
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    first = multiprocessing.parent_process()
    if first is None or not first.is_alive():  # it ended before
        os._exit(1)
