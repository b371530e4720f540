# SPDX-License-Identifier: BSD-3-Clause
"""Hugging Face Accelerate.

    from torch_powersgd.integrations.accelerate import attach

    dist.init_process_group("cpu:powersgd")  # before the Accelerator, which takes it
    accelerator = Accelerator(cpu=True)
    ddp, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    attach(accelerator, ddp)

examples/with_accelerate.py is a whole program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_powersgd.attach import attach as attach_module
from torch_powersgd.checkpoint import CompressionState
from torch_powersgd.options import Options
from torch_powersgd.proposal import Module

if TYPE_CHECKING:
    from accelerate import Accelerator


def attach(accelerator: Accelerator, module: Module, options: Options | None = None) -> None:
    """Compresses the gradients of a module, and saves the state with the accelerator's. Collective.

    The residuals follow the accelerator's GradScaler, if it has one. ``accelerator.save_state`` and
    ``load_state`` then have the state of compression as well.

    Args:
        accelerator: The Accelerator that has prepared the module.
        module: What ``accelerator.prepare`` returned for the model.
        options: Options, or None for ``Options.recommended()``.

    Raises:
        ValueError: If the module cannot be attached, as ``torch_powersgd.attach`` says. It is
            raised on every rank.
    """
    attach_module(module, options or Options.recommended(), scaler=accelerator.scaler)
    accelerator.register_for_checkpointing(CompressionState(module))
