# SPDX-License-Identifier: BSD-3-Clause
"""Lightning.

    from torch_powersgd.integrations.lightning import PowerSGDStrategy

    trainer = Trainer(strategy=PowerSGDStrategy(), ...)

examples/with_lightning.py is a whole program.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.attach import attach
from torch_powersgd.compression import Compression
from torch_powersgd.group_backends import BACKENDS
from torch_powersgd.options import Options

try:
    from lightning.fabric.utilities import move_data_to_device
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torch_powersgd.integrations.lightning needs Lightning ({error}): pip install lightning"
    ) from error

KEY = "torch_powersgd"  # of the state in a checkpoint


class PowerSGDStrategy(DDPStrategy):
    """Lightning's DDP over a powersgd group, with the module attached and its state saved.

    The backend is ``"cpu:powersgd"`` where Lightning trains on CPUs, and
    ``"cpu:gloo,cuda:powersgd"`` on GPUs. The residuals follow the scaler of ``"16-mixed"``. Every
    checkpoint has the state, and a checkpoint without it starts compression anew.

    Args:
        options: Options, or None for those of the process group.
        ddp_arguments: Arguments of ``DDPStrategy``.
    """

    def __init__(self, options: Options | None = None, **ddp_arguments: Any) -> None:
        super().__init__(**ddp_arguments)
        self.options = options
        self.compression: Compression | None = None  # of the module, while it trains
        self._loaded: dict[str, Any] | None = None  # until the module is attached
        self._trained: dict[str, Any] | None = None  # at the end of the last fit

    def _get_process_group_backend(self) -> str:
        return self._process_group_backend or BACKENDS[self.root_device.type]

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._trained = None
        assert isinstance(self.model, DistributedDataParallel)
        scaler = getattr(self.precision_plugin, "scaler", None)
        self.compression = attach(self.model, self.options, scaler=scaler)
        if self._loaded is not None:
            self.compression.load_state_dict(self._loaded)
            self._loaded = None

    # Lightning saves on all ranks, and loads before it wraps the module.
    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **named: Any) -> None:
        if "optimizer_states" in checkpoint:  # one of weights alone has none
            state = self._trained if self.compression is None else self.compression.state_dict()
            if state is not None:
                checkpoint = {**checkpoint, KEY: state}
        super().save_checkpoint(checkpoint, *arguments, **named)

    def on_train_end(self) -> None:
        super().on_train_end()
        # Lightning then unwraps the module and frees the GPU, and may still save checkpoints.
        assert self.compression is not None
        self._trained = move_data_to_device(self.compression.state_dict(), "cpu")
        self.compression = None

    def load_checkpoint(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(*arguments, **named)
        self._loaded = checkpoint.get(KEY)
        return checkpoint

    def teardown(self) -> None:
        self._loaded = None
        super().teardown()
