# SPDX-License-Identifier: BSD-3-Clause
"""Starts processes that find each other as under torchrun, without its slow imports."""

from __future__ import annotations

import gc
import os
import runpy
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import ranks
from support.deadline import DEADLOCK


@dataclass(frozen=True)
class Output:
    """The output of a process."""

    stdout: str
    stderr: str


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    folder: Path,
    timeout: float = DEADLOCK,
) -> list[Output]:
    """Calls function(*args) on each rank, in the folder, where the output files go."""
    job = (world_size, free_port(), folder, function, args)
    return ranks.run(world_size, _main, *job, backend=None, timeout=timeout)


def run_program(program: Path, *arguments: object, folder: Path) -> list[Output]:
    """Runs a Python program on two ranks."""
    return run(2, _run_program, str(program), [str(each) for each in arguments], folder=folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def enter(rank: int, world_size: int, port: int) -> None:
    """Sets torchrun's variables in this process, for init_process_group()."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    local = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in (numbers | local).items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="none")


def _main(
    rank: int,
    world_size: int,
    port: int,
    folder: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Output:
    enter(rank, world_size, port)
    os.chdir(folder)
    written = folder / f"stdout.{rank}", folder / f"stderr.{rank}"
    for descriptor, file in enumerate(written, start=1):
        with file.open("w") as opened:
            os.dup2(opened.fileno(), descriptor)
    function(*args)
    gc.collect()  # destroy modules before their group
    sys.stdout.flush()
    return Output(*(file.read_text() for file in written))


def _run_program(program: str, arguments: list[str]) -> None:
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
