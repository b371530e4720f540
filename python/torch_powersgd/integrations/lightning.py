# SPDX-License-Identifier: BSD-3-Clause
"""Lightning.

    from torch_powersgd.integrations.lightning import PowerSGDStrategy

    trainer = Trainer(strategy=PowerSGDStrategy(), ...)

With local steps, to average every ten steps:

    every_ten = functools.partial(torch_powersgd.LocalSGD, sync_every=10)
    trainer = Trainer(strategy=PowerSGDStrategy(local_steps=every_ten), ...)

examples/with_lightning.py is a whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.attach import attach
from torch_powersgd.compression import Compression
from torch_powersgd.group_backends import BACKENDS
from torch_powersgd.integrations.libraries import overrides, unfit
from torch_powersgd.local_steps import LocalSGD
from torch_powersgd.options import Options

try:
    from lightning.fabric.utilities import move_data_to_device
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins.precision import MixedPrecision
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torch_powersgd.integrations.lightning needs Lightning ({error}): pip install lightning"
    ) from error

KEY = "torch_powersgd"  # of the state in a checkpoint


@overrides("lightning", "_get_process_group_backend")
class PowerSGDStrategy(DDPStrategy):
    """Lightning's DDP over a powersgd group, with the module attached and its state saved.

    The backend is ``"cpu:powersgd"`` if Lightning trains on CPUs, and ``"cpu:gloo,cuda:powersgd"``
    on GPUs. The residuals follow the scaler of ``"16-mixed"``. Checkpoints include the state. From
    a checkpoint without one, compression starts anew.

    Args:
        options: As in ``torch_powersgd.attach``.
        local_steps: Function of the DDP module, the optimizers and ``scaler=`` that returns a
            ``LocalSGD`` or ``DiLoCo``. It replaces ``attach``, and has options of its own. None:
            average in every step.
        ddp_arguments: Arguments of ``DDPStrategy``.
    """

    def __init__(
        self,
        options: Options | Mapping[str, Any] | None = None,
        local_steps: Callable[..., LocalSGD] | None = None,
        **ddp_arguments: Any,
    ) -> None:
        super().__init__(**ddp_arguments)
        self.options = options
        self.local_steps = local_steps
        self.compression: Compression | LocalSGD | None = None  # of the module, while it trains
        self._loaded: dict[str, Any] | None = None  # until the module is attached
        self._trained: dict[str, Any] | None = None  # at the end of the last fit

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or BACKENDS[self.root_device.type]

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._trained = None
        if self.local_steps is None:
            assert isinstance(self.model, DistributedDataParallel)
            self._begin(attach(self.model, self.options, scaler=self._scaler))

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        if self.local_steps is not None:
            self._begin(self.local_steps(self.model, self.optimizers, scaler=self._scaler))

    @property
    def _scaler(self) -> Any:
        if isinstance(self.precision_plugin, MixedPrecision):
            return self.precision_plugin.scaler  # An error if it has none, and not None.
        return getattr(self.precision_plugin, "scaler", None)

    def _begin(self, compression: Compression | LocalSGD) -> None:
        self.compression = compression
        self._restore()

    def _restore(self) -> None:
        if self.compression is not None and self._loaded is not None:
            self.compression.load_state_dict(self._loaded)
            self._loaded = None

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        if self.compression is None:
            fact = "it trains before it has called configure_ddp and setup_optimizers"
            raise RuntimeError(unfit("lightning", fact))
        return super().training_step(*arguments, **named)

    # Lightning saves on all ranks. It loads before it wraps the module, or, as its learning rate
    # finder does, in the middle of the training.
    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if "optimizer_states" in checkpoint:  # a weights-only checkpoint has none
            state = self._trained if self.compression is None else self.compression.state_dict()
            if state is not None:
                checkpoint = {**checkpoint, KEY: state}
        super().save_checkpoint(checkpoint, *arguments, **named)

    # Lightning validates and tests the models of all processes, and saves that of one.
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._make_equal()

    def on_train_end(self) -> None:  # The learning rate finder trains within a training.
        super().on_train_end()
        self._make_equal()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._make_equal()
        return super().lightning_module_state_dict()

    def _make_equal(self) -> None:
        if isinstance(self.compression, LocalSGD):
            self.compression.sync(exact=True)

    def load_checkpoint(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*arguments, **named)
        self._loaded = checkpoint.get(KEY)
        return checkpoint

    def load_model_state_dict(self, *arguments: Any, **named: Any) -> None:
        super().load_model_state_dict(*arguments, **named)
        self._restore()

    # Lightning averages integers as a sum over Gloo, which cannot average them, and asks only for
    # its name.
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if reduce_op not in ("mean", "avg") or not isinstance(tensor, torch.Tensor):
            return super().reduce(tensor, group, reduce_op)
        total = super().reduce(tensor, group, "sum")
        return total.copy_(total / dist.get_world_size(group))

    def teardown(self) -> None:
        self._loaded = None
        module = self.lightning_module
        if self.compression is not None and module is not None and not module.trainer.interrupted:
            # Lightning then unwraps the module and frees the GPU, and may still save checkpoints.
            self._trained = move_data_to_device(self.compression.state_dict(), "cpu")
            if isinstance(self.compression, LocalSGD):
                self.compression.detach()
        self.compression = None
        super().teardown()
