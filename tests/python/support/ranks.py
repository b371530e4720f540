# SPDX-License-Identifier: BSD-3-Clause
"""Runs a function in one process per rank, and kills them after a timeout."""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from support.deadline import DEADLOCK, OPERATION

# A process sends its value and its error, one of which is empty.
Message = tuple[Any, str]
Sender = Connection
Receiver = Connection

# A server that has imported the modules forks the processes. A start then takes milliseconds, and
# each test still gets fresh processes.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        # DDP imports torch._dynamo on first use, which takes seconds.
        *("torch._dynamo", "torch.nn.parallel"),
        *("torch_powersgd", "numpy", "pytest", "support.ranks"),
    ]
)

# Seconds. Once a process has failed, the others may wait for it until they time out.
_GRACE_AFTER_FAILURE = 10


class RankFailed(Exception):
    """Raised if a process failed. The message has its traceback."""


@dataclass
class Outcome:
    """How one process ended."""

    value: Any = None  # the function's
    error: str = ""  # why there is no value
    exitcode: int | None = None  # None: the process was killed


@dataclass(frozen=True)
class Setup:
    """The group of the processes, and how long they may take.

    Attributes:
        backend: the group's backend; None: the function can make a group with ``init_group``.
        options: the group's pg_options, or a list with those of each rank.
        timeout: seconds after which all processes are killed and the test fails.
        op_timeout: the process group's timeout in seconds.
    """

    backend: str | None = "cpu:powersgd"
    options: Any = None
    timeout: float = DEADLOCK
    op_timeout: float = OPERATION


def run(world_size: int, function: Callable[..., Any], *args: Any, **setup: Any) -> list[Any]:
    """Calls function(rank, *args) on each rank inside a process group; returns the results by rank.

    Args:
        function: a picklable (module-level) function with a picklable result.
        setup: those fields of ``Setup`` that differ.

    Raises:
        RankFailed: if any process raised, died or did not end.
    """
    ended = _run(world_size, function, args, Setup(**setup), _GRACE_AFTER_FAILURE)
    failures = [outcome.error for outcome in ended if outcome.error]
    failures += [
        f"rank {rank} returned and then ended with exit code {outcome.exitcode} (None: not at all)"
        for rank, outcome in enumerate(ended)
        if not outcome.error and outcome.exitcode != 0
    ]
    if failures:
        raise RankFailed("\n".join(failures))
    return [outcome.value for outcome in ended]


def outcomes(
    world_size: int, function: Callable[..., Any], *args: Any, **setup: Any
) -> list[Outcome]:
    """Like ``run``, for processes that are expected to fail: waits for all, and raises nothing."""
    made = Setup(**setup)
    return _run(world_size, function, args, made, made.timeout)


def _run(
    world_size: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    setup: Setup,
    grace: float,
) -> list[Outcome]:
    options = setup.options
    with tempfile.TemporaryDirectory() as folder:
        processes, receivers = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            mine = options[rank] if isinstance(options, list) else options
            place = (rank, world_size, f"{folder}/store")
            rank_setup = dataclasses.replace(setup, options=mine)
            process = context.Process(target=main, args=(sender, place, rank_setup, function, args))
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        try:
            return _collect(processes, receivers, setup.timeout, grace)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(
    processes: list[ForkServerProcess], receivers: list[Receiver], timeout: float, grace: float
) -> list[Outcome]:
    deadline = time.monotonic() + timeout
    ended = [
        Outcome(
            error=f"rank {rank} did not end within {timeout} s, or {grace} s after another failed"
        )
        for rank in range(len(processes))
    ]
    waiting: dict[object, int] = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting:
        left = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(
            [receivers[rank] for rank in waiting.values()], left
        )
        if not ready:
            return ended
        for receiver in ready:
            rank = waiting.pop(receiver)
            try:
                ended[rank].value, ended[rank].error = receivers[rank].recv()
            except EOFError:
                processes[rank].join(_GRACE_AFTER_FAILURE)
                ended[rank].error = f"rank {rank} died with exit code {processes[rank].exitcode}"
            if ended[rank].error:
                deadline = min(deadline, time.monotonic() + grace)
    for process, outcome in zip(processes, ended, strict=True):
        process.join(max(0.1, deadline - time.monotonic()))
        outcome.exitcode = process.exitcode
    return ended


_place: tuple[int, int, str]  # rank, world size and the path of the store, in a rank's process
_groups_made = 0


def init_group(backend: str | None, options: Any = None, op_timeout: float = OPERATION) -> None:
    """Makes the default process group of a rank, again after destroy_process_group if need be.

    A short ``op_timeout`` applies to the group's operations, not to its start.
    """
    import torch.distributed as dist

    import torch_powersgd  # noqa: F401 - registers the backend
    from support.groups import world

    global _groups_made
    _groups_made += 1
    rank, world_size, path = _place
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{path}.{_groups_made}", world_size),
        rank=rank,
        world_size=world_size,
        pg_options=options,
        timeout=timedelta(seconds=max(op_timeout, OPERATION)),
    )
    if op_timeout < OPERATION:
        world().set_timeout(timedelta(seconds=op_timeout))


def side_store() -> Any:
    """A store that no process group uses, for signals between ranks whose group is broken."""
    import torch.distributed as dist

    # Without a world size: the file would be deleted once so many of its stores are closed.
    return dist.FileStore(f"{_place[2]}.side")


def main(
    sender: Sender,
    place: tuple[int, int, str],
    setup: Setup,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    global _place
    _place = place
    # Prints the stacks if the process crashes, or hangs and is about to be killed.
    faulthandler.enable()
    faulthandler.dump_traceback_later(setup.timeout * 0.9, exit=False)
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if setup.backend is not None:
            init_group(setup.backend, setup.options, setup.op_timeout)
        result = function(place[0], *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        sender.send((result, ""))
    except BaseException:  # the parent raises it
        sender.send((None, f"rank {place[0]}:\n{traceback.format_exc()}"))
        os._exit(1)
