# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints with a file for each process, from which a job resumes bit for bit."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd.agreement import agree
from torch_powersgd.group_backends import group_or_default
from torch_powersgd.option_values import is_bool, require

_KEPT = 2  # files of a process: a job may be killed when only some processes have saved a step
_NAME = re.compile(r"step(\d+)-rank(\d+)of(\d+)\.pt")


def save_per_rank(
    folder: str | os.PathLike[str],
    step: int,
    state: dict[str, Any],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Saves this process's state of a step. Not collective.

    It also keeps the state that this process saved before, and deletes older ones.

    Args:
        folder: Folder for the files of all processes, or of those of one host. It is created.
        step: Number of the step.
        state: What ``torch.save`` takes: the state of the model, of the optimizer, and
            ``state_dict(per_rank=True)`` of the compression or the local steps.
        group: Group of the processes. None: the default group.

    Raises:
        ValueError: If the step is no integer >= 0.
    """
    fits = isinstance(step, int) and not is_bool(step) and step >= 0
    require(fits, "step", "an integer >= 0", step)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    group = group_or_default(group)
    whole = path / f"step{step}-rank{group.rank()}of{group.size()}.pt"
    unfinished = whole.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(whole)
    saved = _saved(path, group)
    for other in sorted(saved)[:-_KEPT]:
        saved[other].unlink()


def load_per_rank(
    folder: str | os.PathLike[str], group: dist.ProcessGroup | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Loads this process's state of the last step that all processes have saved. Collective.

    It deletes this process's states of later steps, which the job will take again.

    Args:
        folder: As in ``save_per_rank``.
        group: As in ``save_per_rank``.

    Returns:
        The number of the step, and the state with its tensors on the CPU. None: no process has
        saved any, so training begins.

    Raises:
        ValueError: On every process alike, if the processes have no step in common, if another
            number of processes saved the files, or if a file is damaged. No file was deleted.
    """
    path, group = Path(folder), group_or_default(group)
    call = "load_per_rank"
    saved, step = agree(group, call, lambda: _found(path, group), _check, _last)
    if step is None:
        return None
    state, _ = agree(
        group,
        call,
        lambda: (torch.load(saved[step], map_location="cpu"), {}),
        lambda everyone: "",
    )
    for other, file in saved.items():
        if other > step:
            file.unlink()
    return step, state


def _saved(path: Path, group: dist.ProcessGroup) -> dict[int, Path]:
    """The files of this process, by their steps."""
    mine = group.rank(), group.size()
    return {step: file for (step, *whose), file in _all(path).items() if (*whose,) == mine}


def _all(path: Path) -> dict[tuple[int, int, int], Path]:
    """The files of all processes, by the numbers in their names."""
    names = [(_NAME.fullmatch(file.name), file) for file in path.glob("*.pt")]
    return {(int(of[1]), int(of[2]), int(of[3])): file for of, file in names if of}


def _found(path: Path, group: dist.ProcessGroup) -> tuple[dict[int, Path], dict[str, Any]]:
    saved = _saved(path, group)
    worlds = {world for _, _, world in _all(path)}
    return saved, {"steps": sorted(saved), "worlds": sorted(worlds)}


def _last(everyone: list[dict[str, Any]]) -> int | None:
    steps = set.intersection(*(set(found["steps"]) for found in everyone))
    return max(steps, default=None)


def _check(everyone: list[dict[str, Any]]) -> str:
    if _last(everyone) is not None:
        return ""
    worlds = {world for found in everyone for world in found["worlds"]}
    if len(everyone) in worlds:
        steps = "; ".join(
            f"rank {rank} has {', '.join(map(str, found['steps'])) or 'none'}"
            for rank, found in enumerate(everyone)
        )
        return f"no step was saved by all processes: {steps}"
    if worlds:
        saved = " or ".join(map(str, sorted(worlds)))
        return (
            f"the checkpoints are of {saved} processes, and {len(everyone)} load them: start as "
            "many, or choose another folder"
        )
    return ""
