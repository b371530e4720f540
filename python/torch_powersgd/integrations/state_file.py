# SPDX-License-Identifier: BSD-3-Clause
"""The file of a library's checkpoint that holds the state of a compression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd import log
from torch_powersgd.compression import Compression
from torch_powersgd.local_steps import LocalSGD


def load(compression: Compression | LocalSGD, file: Path) -> None:
    """Loads the state, unless no process has the file: a run without compression saves none.

    Raises:
        ValueError: On every process, if one has no file or a damaged one, or if the folder has only
            files of other compressions.
    """
    state: Any = None
    found = file.exists()
    if found:
        try:
            state = torch.load(file, weights_only=True)
        except Exception as error:  # Of any type: the other processes wait for this one.
            log.warning(f"{file} is damaged: {error}")
            state = {}
    everyone: list[list[str]] = [[]] * compression.group.size()
    files = sorted(path.name for path in file.parent.glob("powersgd_*.pt"))
    dist.all_gather_object(everyone, [file.name] if found else files, compression.group)
    names = [name for names in everyone for name in names]
    if file.name in names:  # A process without a state makes load_state_dict raise on all of them.
        compression.load_state_dict(state)
    elif names:
        raise ValueError(
            f"{file} does not exist, but {names[0]} does: attach the modules in the same order as "
            "in the run that has saved the checkpoint"
        )
    else:
        message = f"{file} does not exist, so compression starts as in a new run"
        log.of(compression.group).notice(message)
