# SPDX-License-Identifier: BSD-3-Clause
"""Ray Train.

    from torch_powersgd.integrations.ray import PowerSGDConfig

    trainer = TorchTrainer(train, torch_config=PowerSGDConfig(), ...)

    def train() -> None:  # on every worker
        ddp = ray.train.torch.prepare_model(model)
        torch_powersgd.attach(ddp)

examples/with_ray.py is a whole program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_powersgd._backend import NAME, register
from torch_powersgd.integrations.libraries import overrides

try:
    from ray.train.torch import TorchConfig
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torch_powersgd.integrations.ray needs Ray Train ({error}): pip install 'ray[train]'"
    ) from error

_TORCH_BACKEND: Any = TorchConfig().backend_cls


@overrides("ray")
@dataclass
class PowerSGDConfig(TorchConfig):  # type: ignore[misc]
    """Ray's ``TorchConfig`` for workers whose process group is a powersgd group.

    Ray makes the group before the training function runs, and up to torch 2.14 the backend must be
    imported by then. With this configuration each worker imports it first. The options belong to
    ``torch_powersgd.attach``, in the training function.

    The default of ``backend``, ``"powersgd"``, serves the CPU and, on GPUs, CUDA. The other
    arguments are those of ``TorchConfig``.
    """

    backend: str | None = NAME  # Ray would replace None with "gloo" or "nccl"

    @property
    def backend_cls(self) -> type[Any]:
        return PowerSGDBackend


@overrides("ray")
class PowerSGDBackend(_TORCH_BACKEND):  # type: ignore[misc]
    """The class that ``PowerSGDConfig`` names. Ray calls it where it starts the workers."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        # A worker imports the package to unpickle this function. With Ray Train V2 it already has,
        # to unpickle the configuration, but not with RAY_TRAIN_V2_ENABLED=0.
        worker_group.execute(register)
        super().on_start(worker_group, backend_config)
