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

import weakref
from typing import TYPE_CHECKING, Any

from torch_powersgd.attach import attach as attach_module
from torch_powersgd.checkpoint import load_state_dict, state_dict
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
    module = getattr(module, "_orig_mod", module)  # Accelerate compiles the wrapped module.
    attach_module(module, options or Options.recommended(), scaler=accelerator.scaler)
    # accelerator.free_memory forgets the modules, and not what was registered for them.
    accelerator._custom_objects = [
        registered
        for registered in accelerator._custom_objects
        if not isinstance(registered, _State) or registered.module() is not None
    ]
    accelerator.register_for_checkpointing(_State(module))


class _State:
    """The state of an attached module, which it does not keep alive."""

    def __init__(self, module: Module) -> None:
        self.module = weakref.ref(module)

    def state_dict(self) -> dict[str, Any]:
        module = self.module()
        return {} if module is None else state_dict(module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        module = self.module()
        if module is not None:
            load_state_dict(module, state)
