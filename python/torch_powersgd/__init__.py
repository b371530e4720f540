# SPDX-License-Identifier: BSD-3-Clause
"""A process-group backend for PyTorch that compresses gradients with PowerSGD.

    import torch_powersgd
    dist.init_process_group("cpu:powersgd")
    ddp = DistributedDataParallel(model)
    torch_powersgd.attach(ddp, torch_powersgd.Options.recommended())

Importing the package registers the backend ``"powersgd"`` for CPU and CUDA.
"""

from typing import TYPE_CHECKING

from torch_powersgd._backend import register
from torch_powersgd._version import __version__
from torch_powersgd.attach import attach, comm_hook, detach
from torch_powersgd.checkpoint import CompressionState, load_state_dict, state_dict
from torch_powersgd.control import compression, discard_step, set_grad_scale, step_skipped
from torch_powersgd.options import Options, configure
from torch_powersgd.stats import reset_stats, stats

if TYPE_CHECKING:
    from torch_powersgd.tools.shadow import Shadow, shadow
    from torch_powersgd.tools.shadow_compressors import ShadowedLayer

__all__ = [
    "CompressionState",
    "Options",
    "Shadow",
    "ShadowedLayer",
    "__version__",
    "attach",
    "comm_hook",
    "compression",
    "configure",
    "detach",
    "discard_step",
    "load_state_dict",
    "reset_stats",
    "set_grad_scale",
    "shadow",
    "state_dict",
    "stats",
    "step_skipped",
]

register()


def __getattr__(name: str) -> object:
    """Imports shadow mode, which training does without, where it is asked for."""
    if name not in ("Shadow", "ShadowedLayer", "shadow"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch_powersgd.tools import shadow

    found: object = getattr(shadow, name)
    return found
