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

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.attach import attach as attach_module
from torch_powersgd.compression import Compression
from torch_powersgd.options import Options

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(
    accelerator: Accelerator,
    module: DistributedDataParallel | FSDPModule,
    options: Options | None = None,
) -> Compression:
    """Compresses the gradients of a module, and saves the state with the accelerator's. Collective.

    The residuals follow the accelerator's GradScaler, if it has one. ``accelerator.save_state`` and
    ``load_state`` save and load the state of the compression too.

    Args:
        accelerator: The Accelerator that has prepared the module.
        module: What ``accelerator.prepare`` returned for the model.
        options: Options, or None for those of the process group.

    Returns:
        What ``torch_powersgd.attach`` returns.

    Raises:
        ValueError: On every process, as ``torch_powersgd.attach``.
    """
    module = getattr(module, "_orig_mod", module)  # Accelerate compiles the wrapped module.
    compression = attach_module(module, options, scaler=accelerator.scaler)
    # accelerator.free_memory forgets the modules, but not what was registered for them.
    accelerator._custom_objects = [
        registered
        for registered in accelerator._custom_objects
        if not isinstance(registered, _State) or not registered.compression.ended
    ]
    accelerator.register_for_checkpointing(_State(compression))
    return compression


class _State:
    """A compression's state, with all shards of its module. It is empty once the module is gone."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression

    def state_dict(self) -> dict[str, Any]:
        if self.compression.ended:
            return {}
        state = self.compression.state_dict()
        if "version" in state:
            return state
        # Accelerate saves what the main process returns, which has one shard.
        everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, state if self.compression.group.rank() == 0 else {})
        return {key: shard for shards in everyone for key, shard in shards.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.compression.ended:
            self.compression.load_state_dict(state)
