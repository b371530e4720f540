# SPDX-License-Identifier: BSD-3-Clause
"""A process-group backend for PyTorch that compresses gradients with PowerSGD.

    import torch_powersgd
    dist.init_process_group("cpu:powersgd")
    ddp = DistributedDataParallel(model)
    compression = torch_powersgd.attach(ddp)

Importing the package registers the backend ``"powersgd"`` for CPU and CUDA.
"""

from torch_powersgd._backend import register
from torch_powersgd._version import __version__
from torch_powersgd.attach import attach
from torch_powersgd.compression import Compression
from torch_powersgd.local_steps import DiLoCo, LocalSGD
from torch_powersgd.options import Options, configure
from torch_powersgd.per_rank import load_per_rank, save_per_rank
from torch_powersgd.scope import scope
from torch_powersgd.shadow_mode import Shadow, ShadowedLayer, shadow
from torch_powersgd.stats import stats

__all__ = [
    "Compression",
    "DiLoCo",
    "LocalSGD",
    "Options",
    "Shadow",
    "ShadowedLayer",
    "__version__",
    "attach",
    "configure",
    "load_per_rank",
    "save_per_rank",
    "scope",
    "shadow",
    "stats",
]

register()


def __dir__() -> list[str]:
    return __all__
