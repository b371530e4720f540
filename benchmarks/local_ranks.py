# SPDX-License-Identifier: BSD-3-Clause
"""Runs a function on local ranks, one process for each, and ends them in time."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.multiprocessing.spawn import ProcessContext, start_processes

LEAST_MEMORY = 3 << 29  # bytes that stay free; ranks that take more are ended

# The server that forks the ranks imports the modules that take seconds.
multiprocessing.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.nn.parallel",
        "torch_powersgd",
        "sklearn.datasets",
        "rich.progress",
        "matplotlib.pyplot",
    ]
)


def call(
    function: Callable[..., Any], world: int, *args: Any, what: str, seconds: float
) -> list[Any]:
    """Calls function(rank, folder, *args) on every rank. Returns all results, by rank.

    Args:
        function: the function to call. Its result is JSON. The ranks share the folder.
        world: the number of ranks.
        args: further arguments of the function.
        what: the name of the run, for errors.
        seconds: the time after which the ranks are ended.

    Raises:
        TimeoutError: if the ranks do not end in time.
        MemoryError: if the machine is about to run out of memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            _rank,
            (Path(folder), function, args),
            world,
            join=False,
            start_method="forkserver",
        )
        _join(context, what, seconds)
        files = (Path(folder) / f"result{rank}" for rank in range(world))
        return [json.loads(file.read_text()) for file in files]


def bytes_written() -> int:
    """The bytes that this process has handed to write and similar calls, as Gloo does."""
    return _number_of(Path("/proc/self/io"), "wchar")


def available_memory() -> int:
    """The bytes that the machine can still give to processes."""
    return 1024 * _number_of(Path("/proc/meminfo"), "MemAvailable")


def anonymous_memory() -> int:
    """The bytes of this process's own memory that it has touched."""
    return 1024 * _number_of(Path("/proc/self/status"), "RssAnon")


def _number_of(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"{file} has no {name}")


def _join(context: ProcessContext, what: str, seconds: float) -> None:
    """Waits for the ranks. Raises what a rank raised."""
    deadline = time.monotonic() + seconds
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not end within {seconds:g} s")
            if available_memory() < LEAST_MEMORY:
                raise MemoryError(f"{what} leaves less than {LEAST_MEMORY >> 20} MiB of memory")
    finally:
        for process in context.processes:
            process.kill()


def _rank(rank: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    result = function(rank, folder, *args)
    (folder / f"result{rank}").write_text(json.dumps(result))
