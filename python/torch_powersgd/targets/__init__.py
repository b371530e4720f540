# SPDX-License-Identifier: BSD-3-Clause
"""The kinds of gradients that ``attach`` takes.

Each of ``ddp.py``, ``fsdp.py`` and ``tensors.py`` finds the gradients of one kind, checks them and
registers its hooks. ``misuse.py`` watches how an attached module is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd.option_values import must_be
from torch_powersgd.targets.ddp import DdpTarget
from torch_powersgd.targets.fsdp import FsdpTarget
from torch_powersgd.targets.target import Target, shard_of
from torch_powersgd.targets.tensors import TensorsByName

__all__ = ["DdpTarget", "FsdpTarget", "Target", "TensorsByName", "shard_of", "target_of"]


def target_of(given: object) -> Target:
    """Returns the kind of the first argument of ``attach``.

    Raises:
        ValueError: If it is of no known kind.
    """
    if isinstance(given, DistributedDataParallel):
        return DdpTarget(given)
    if isinstance(given, FSDPModule):
        return FsdpTarget(given)
    if isinstance(given, Mapping):
        return TensorsByName(given)
    raise must_be(
        "target",
        "a DistributedDataParallel module, a module that fully_shard or replicate was called with, "
        "or a dict of named tensors",
        type(given),
    )
