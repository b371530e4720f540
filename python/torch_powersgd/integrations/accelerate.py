# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face Accelerate.

    from torch_powersgd.integrations.accelerate import attach

    dist.init_process_group("cpu:powersgd")  # before the Accelerator, which takes it
    accelerator = Accelerator(cpu=True)
    ddp, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    attach(accelerator, ddp)

For local steps, which average every ten steps, you need none of this:

    steps = torch_powersgd.LocalSGD(ddp, optimizer, sync_every=10, scaler=accelerator.scaler)
    accelerator.register_for_checkpointing(steps)

examples/with_accelerate.py is a whole program.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.attach import attach as attach_module
from torch_powersgd.compression import Compression
from torch_powersgd.integrations import state_file
from torch_powersgd.options import Options

if TYPE_CHECKING:
    from accelerate import Accelerator

# By the number of its file, which a compression keeps when others end.
_compressions: WeakKeyDictionary[Accelerator, dict[int, Compression]] = WeakKeyDictionary()


def attach(
    accelerator: Accelerator,
    module: DistributedDataParallel | FSDPModule,
    options: Options | Mapping[str, Any] | None = None,
) -> Compression:
    """Compresses the gradients of a module, and saves the state with the accelerator's. Collective.

    The residuals follow the accelerator's GradScaler, if it has one. From now on,
    ``accelerator.save_state`` and ``load_state`` save and load the state of the compression too. A
    checkpoint from a run without compression has none: the exact steps then come first again.
    Several modules must be attached in the same order as in the run that has saved.

    Args:
        accelerator: The Accelerator that has prepared the module.
        module: What ``accelerator.prepare`` returned for the model.
        options: As in ``torch_powersgd.attach``.

    Returns:
        What ``torch_powersgd.attach`` returns.

    Raises:
        ValueError: On every process, as ``torch_powersgd.attach``.
    """
    module = getattr(module, "_orig_mod", module)  # Accelerate compiles the wrapped module.
    compression = attach_module(module, options, scaler=accelerator.scaler)
    if accelerator not in _compressions:
        accelerator.register_save_state_pre_hook(functools.partial(_save, accelerator))
        accelerator.register_load_state_pre_hook(functools.partial(_load, accelerator))
    # accelerator.free_memory may have freed the modules of others.
    living = _living(accelerator)
    number = next(i for i in itertools.count() if i not in living)
    _compressions[accelerator] = {**living, number: compression}
    return compression


def _save(accelerator: Accelerator, models: Any, weights: Any, folder: str) -> None:
    for file, compression in _files(accelerator, folder):
        accelerator.save(_with_all_shards(compression), file)


def _load(accelerator: Accelerator, models: Any, folder: str) -> None:
    for file, compression in _files(accelerator, folder):
        state_file.load(compression, file)


def _living(accelerator: Accelerator) -> dict[int, Compression]:
    return {i: each for i, each in _compressions.get(accelerator, {}).items() if not each.ended}


def _files(accelerator: Accelerator, folder: str) -> Iterator[tuple[Path, Compression]]:
    for i, compression in sorted(_living(accelerator).items()):
        yield Path(folder, f"powersgd_{i}.pt"), compression


def _with_all_shards(compression: Compression) -> dict[str, Any]:
    """Returns the state with all shards of the module, because only the main process saves it."""
    state = compression.state_dict()
    if "version" in state:  # There are no shards.
        return state
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, state if compression.group.rank() == 0 else {})
    return {key: shard for shards in everyone for key, shard in shards.items()}
