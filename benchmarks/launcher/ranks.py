# SPDX-License-Identifier: BSD-3-Clause
"""Starts one process per rank, all of them local or each on its own host.

A server that has imported torch forks them, which saves several seconds per start. The processes
end when the server does, and the server ends when this process does, for whatever reason.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import shutil
import signal
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
from process import available_memory

from launcher import hosts
from launcher.signals import uninterrupted

LEAST_MEMORY = 3 << 29  # bytes to keep free; processes that need more are ended

_context = multiprocessing.get_context("forkserver")
# The error line of Python or C++. Only stack traces follow it.
_ERROR = re.compile(r"(Error|Exception): |what\(\):")
_EXIT_SECONDS = 20  # for processes to end once their pipes are closed
_GRACE_SECONDS = 5  # for the errors of the other processes once one has failed

_preloaded = ["torch._dynamo", "torch.nn.parallel"]


def preload(*modules: str) -> None:
    """Makes the server import these modules too, if it has not started yet."""
    _preloaded.extend(modules)


# Keeps the groups until the process exits. Otherwise a callback of torch's hook may hold the last
# reference to one: Gloo's own thread then destroys it, and aborts on joining itself.
_groups: list[dist.ProcessGroup | None] = []


@contextmanager
def default_group(backend: str, **arguments: Any) -> Iterator[None]:
    """A context with a default group, which init_process_group makes with these arguments.

    After an exception the group is not destroyed, because that could hang.
    """
    dist.init_process_group(backend, **arguments)
    _groups.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


def alone(device: torch.device) -> AbstractContextManager[None]:
    """A context with a default group of this process alone."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    return default_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@dataclass(frozen=True)
class Rank:
    """What a process is given when it starts.

    Attributes:
        number: its rank.
        world: the number of ranks.
        folder: a folder that all ranks of this start share.
        pipe: its end of the pipe to the process that started it.
    """

    number: int
    world: int
    folder: Path
    pipe: Connection

    def group(
        self, backend: str, seconds: float, options: Any = None
    ) -> AbstractContextManager[None]:
        """A context with a default group of all ranks, with a timeout in seconds."""
        return default_group(
            backend,
            store=dist.FileStore(str(self.folder / "store"), self.world),
            rank=self.number,
            world_size=self.world,
            timeout=timedelta(seconds=seconds),
            pg_options=options,
        )


class Ranks:
    """Processes that each call function(rank, *args), where rank is a `Rank`.

    The constructor starts them. At the end of a with block their pipes are closed, so that they can
    exit; after an exception, or some seconds, they are killed. `processes` and `pipes` are indexed
    by rank.

    Args:
        function: the function to call. `result` returns its result, which must be JSON.
        where: the number of local processes, or the hosts that they are on.
        args: further arguments of the function.
        variables: additions to the processes' environment.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        where: int | hosts.Hosts,
        *args: Any,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        namespaces = [""] * where if isinstance(where, int) else where.of_ranks
        self.folder = Path(tempfile.mkdtemp(prefix=f"{hosts.owner()}-"))
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        _context.set_forkserver_preload(_preloaded)  # one list for the whole process
        for number, namespace in enumerate(namespaces):
            pipe, far_end = _context.Pipe()
            rank = Rank(number, len(namespaces), self.folder, far_end)
            call = (rank, namespace, variables or {}, function, args)
            self.processes.append(_context.Process(target=_run, args=call, daemon=True))
            self.pipes.append(pipe)
            with uninterrupted():
                self.processes[-1].start()
            far_end.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        if kind is None:
            # Killing one client of MPS can bring down the others.
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
        """Waits until all processes have ended, at most for `seconds`."""
        deadline = time.monotonic() + seconds
        while (running := self.running) and (left := deadline - time.monotonic()) > 0:
            connection.wait([process.sentinel for process in running], left)

    def result(self, number: int) -> Any:
        """The result of a process that has ended."""
        return json.loads((self.folder / f"result{number}").read_text())

    def complaints(self) -> str:
        """The errors of the failed processes, without duplicates."""
        self.wait(_GRACE_SECONDS)
        said = []
        for number, code in self._failures():
            lines = [line.strip() for line in self._log(number).splitlines() if line.strip()]
            lines = [line for line in lines if _ERROR.search(line)] or lines
            said.append(lines[-1] if lines else f"a process ended with {code}, silently")
        return "; ".join(dict.fromkeys(said))

    def log_of_failed(self) -> str:
        """The last output of the first failed process."""
        return self._log(self._failures()[0][0])[-3000:]

    def _failures(self) -> list[tuple[int, int]]:
        """The numbers and the exit codes of failed processes."""
        return [(i, each.exitcode) for i, each in enumerate(self.processes) if each.exitcode]

    def _log(self, number: int) -> str:
        return (self.folder / f"log{number}").read_text(errors="replace")

    def keep_logs(self, folder: Path | None, name: str) -> None:
        """Copies the processes' output to the folder, if there is one."""
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
    """Calls function(rank, *args) on every rank, as `Ranks` does. Returns the results by rank.

    Args:
        function, where, args, variables: as for `Ranks`.
        what: the name of the run, for error messages.
        seconds: the time after which the processes are ended.

    Raises:
        RuntimeError: if a process fails, with its error.
        TimeoutError: if the processes do not end in time.
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


def _run(
    rank: Rank,
    namespace: str,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Runs a rank in its own session, so that Ctrl-C only reaches the parent."""
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
        os.environ["POWERSGD_HOST"] = namespace
        os.environ["NCCL_HOSTID"] = str(rank.number)  # or NCCL refuses two processes on a GPU
    result = function(rank, *args)
    (rank.folder / f"result{rank.number}").write_text(json.dumps(result))


def _die_with_parent() -> None:
    death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL)
    first = multiprocessing.parent_process()
    if first is None or not first.is_alive():  # it has already ended
        os._exit(1)
