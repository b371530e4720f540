# SPDX-License-Identifier: BSD-3-Clause
"""torchtitan.

    from torch_powersgd.integrations.torchtitan import compressed
    from torchtitan.models.llama3 import config_registry

    def llama3_8b():  # in a module of yours, which --module names
        return compressed(config_registry.llama3_8b())

examples/with_torchtitan.py is a whole program.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch.distributed as dist

from torch_powersgd._backend import NAME
from torch_powersgd.attach import attach
from torch_powersgd.integrations.libraries import overrides
from torch_powersgd.option_values import require
from torch_powersgd.options import Options, configure, to_plain

try:
    import tyro
    from torchtitan.distributed import ParallelDims
    from torchtitan.tools.utils import device_type
    from torchtitan.trainer import Trainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"torch_powersgd.integrations.torchtitan needs torchtitan ({error}): pip install torchtitan"
    ) from error

KEY = "torch_powersgd"  # of the state in a checkpoint


def compressed(config: Trainer.Config, options: Options | None = None) -> Trainer.Config:
    """Returns the config of the same training, with compression between the replicas.

    The replicas are those of ``parallelism.data_parallel_replicate_degree``, which must be 2 or
    more. All process groups have the backend ``"powersgd"``, and every other collective is exact.
    Checkpoints include the state of compression. CUDA graphs are disabled, because a graph would
    replay the exact steps forever.

    Args:
        config: What a function of a config registry returns.
        options: Options, or None for the defaults.

    Raises:
        ValueError: If the config belongs to another trainer than torchtitan's ``Trainer``.
    """
    fits = type(config) is Trainer.Config
    require(fits, "config", "a torchtitan Trainer.Config", type(config))
    # A config holds plain values, which torchtitan writes as JSON.
    plain = to_plain(dataclasses.replace(options or Options(), scope="attached"))
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    made: Trainer.Config = CompressedTrainer.Config(**fields, powersgd=plain)
    made.training.disable_cuda_graphs = True
    return made


@overrides("torchtitan")
class CompressedTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer over powersgd groups, with its model attached and the state saved.

    Attributes:
        compressions: What ``attach`` returned for each of ``model_parts``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        powersgd: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """The fields of ``Options``, as plain values."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.compressions = [attach(part) for part in self.model_parts]
        if config.checkpoint.enable:
            for i, compression in enumerate(self.compressions):
                self.checkpointer.states[f"{KEY}_{i}" if i > 0 else KEY] = compression

    def init_distributed(self) -> ParallelDims:
        configure(Options(**self.config.powersgd))
        # torchtitan looks here for its backend.
        backends = dist.Backend.default_device_backend_map
        default = backends[device_type]
        backends[device_type] = NAME
        try:
            dims = super().init_distributed()
        finally:
            backends[device_type] = default
        require(
            dims.dp_replicate_enabled,
            "parallelism.data_parallel_replicate_degree",
            "at least 2, because compression works between replicas",
            dims.dp_replicate,
        )
        return dims
