# SPDX-License-Identifier: BSD-3-Clause
"""The first part of ``attach``, which changes nothing: checks, and agreement of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import ddp, fsdp
from torch_powersgd._backend import compare_options
from torch_powersgd._core import _C
from torch_powersgd.lookup import check_alive, find_backend
from torch_powersgd.options import Options, lay_over
from torch_powersgd.store_agreement import error_as_arguments, next_call

Module = DistributedDataParallel | FSDPModule


@dataclass(frozen=True)
class Proposal:
    """The arguments that one rank brings to ``attach``.

    Attributes:
        backend: The backend of the module's group.
        options: The options of the module.
        parameters: The parameters to compress, by name.
        place: The part of the module that the rank holds, if FSDP2 has sharded it.
    """

    backend: _C.BackendPowerSGD
    options: Options
    parameters: dict[str, torch.Tensor]
    place: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """Returns the values that must be equal on all ranks, in JSON types."""
        shapes = {name: list(parameter.shape) for name, parameter in self.parameters.items()}
        devices = sorted({parameter.device.type for parameter in self.parameters.values()})
        kernels = f"{' and '.join(devices)} {_C.kernels_version}"
        options = {"kernels": kernels, **self.options._plain(), "parameters": shapes}
        return {"options": options, "place": self.place}


def agree(
    module: Module,
    given: Options | Mapping[str, Any] | None,
    scaler: torch.amp.GradScaler | None,
    group: dist.ProcessGroup,
    known: _C.AttachedModel | None,
) -> Proposal:
    """Returns this rank's proposal once all ranks have made the same. Collective.

    Args:
        module: Module to attach.
        given: Options of ``attach``.
        scaler: GradScaler of ``attach``.
        group: Group of the replicas.
        known: Core's side of the module if it was attached before.

    Raises:
        ValueError: On every rank, if a rank's proposal is invalid or differs from rank 0's, or a
            rank makes none. On this rank alone, if the group was destroyed here.
    """
    check_alive(group)
    proposal = None
    try:
        proposal = _propose(module, given, scaler, group, known)
        plain = proposal.plain()
    except Exception as invalid:  # The other ranks wait for this rank's error, of any type.
        plain = error_as_arguments(invalid)
    timeout = proposal.backend.options._timeout if proposal is not None else default_pg_timeout
    next_call(group, "attach", timeout).agree(plain, _compare)
    assert proposal is not None  # else the ranks did not agree
    return proposal


def _propose(
    module: Module,
    given: Options | Mapping[str, Any] | None,
    scaler: torch.amp.GradScaler | None,
    group: dist.ProcessGroup,
    known: _C.AttachedModel | None,
) -> Proposal:
    if known is None:
        _check_module(module)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    parameters = _parameters_of(module)
    if not parameters:
        raise ValueError(
            "this module shows no trainable parameters; a tensor-parallel one in DDP has none from "
            "its first forward pass on: attach it before"
        )
    backend = _backend_of(group, next(iter(parameters.values())).device)
    base = Options._from_core(known.options if known else backend.options.compression)
    options = lay_over(base, given, "options of attach")
    if known is not None and options != base:
        old, new = base._plain(), options._plain()
        name = next(name for name in old if old[name] != new[name])
        raise ValueError(
            f"options of a module that was attached before cannot be changed: {name} is "
            f"{old[name]!r}, got {new[name]!r}"
        )
    place = fsdp.place_of(module) if isinstance(module, FSDPModule) else {}
    return Proposal(backend, options, parameters, place)


def _compare(everyone: list[dict[str, Any]]) -> str:
    return fsdp.compare_places([given["place"] for given in everyone]) or compare_options(
        [given["options"] for given in everyone]
    )


def group_of_replicas(module: object, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group of replicas. It raises a ValueError if no group is known."""
    if isinstance(module, FSDPModule):
        return fsdp.group_of(module, group)
    if isinstance(module, DistributedDataParallel):
        return ddp.group_of(module, group)
    raise ValueError(
        "attach takes a DistributedDataParallel module or one that fully_shard has sharded, "
        f"got {type(module).__name__}"
    )


def _check_module(module: Module) -> None:
    """Raises a ValueError if hooks cannot reduce the module's gradients."""
    if isinstance(module, FSDPModule):
        fsdp.check_module(module)
    else:
        ddp.check_module(module)


def _parameters_of(module: Module) -> dict[str, torch.Tensor]:
    if isinstance(module, FSDPModule):
        return fsdp.shards_of(module)
    return ddp.parameters_of(module)


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> _C.BackendPowerSGD:
    backend = find_backend(group, device)
    if backend is None:
        raise ValueError(
            f"attach needs a process group with the powersgd backend for {device.type}; this "
            f"module's has {group._get_backend(device).name()!r}. Use "
            f'init_process_group("{device.type}:powersgd")'
        )
    if not _C.has_kernels(device.type):
        raise ValueError(
            f"this build of torch_powersgd has no kernels for {device.type}: build it again with "
            "the CUDA toolkit at hand (CUDA_HOME) and POWERSGD_BUILD_CUDA=1, which says what is "
            "missing"
        )
    return backend
