# SPDX-License-Identifier: BSD-3-Clause
"""Layer-by-layer compression of the gradients of a module that DDP or FSDP2 wraps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import fsdp, fsdp_hooks, grad_scaler, reduction_checks
from torch_powersgd._core import _C
from torch_powersgd.announcement import announce
from torch_powersgd.ddp import Hook, parameters_of, python_hook, set_hook
from torch_powersgd.options import Options
from torch_powersgd.proposal import Module, agree, group_of_replicas
from torch_powersgd.rewrapping import note_wrapper


@dataclass
class Attachment:
    """The record of an attached module.

    Attributes:
        model: The core's side of the module.
        group: The group over which its gradients are averaged.
        scaler: The GradScaler that ``model`` follows, if there is one.
    """

    model: _C.BucketReducer
    group: dist.ProcessGroup
    scaler: torch.amp.GradScaler | None = None


_attachments: WeakKeyDictionary[Module, Attachment] = WeakKeyDictionary()


def attach(
    module: Module,
    options: Options | Mapping[str, Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compresses the gradients of a module layer by layer. Collective.

    Each weight is compressed by its own shape (shape[0] x the rest), and its state belongs to the
    parameter. The state survives DDP's rebuilding of buckets, and ``state_dict`` saves it. A module
    that is attached again after ``detach`` goes on with the state that was kept.

    On a DDP module it registers a C++ communication hook, so that no Python runs in backward. In a
    module that ``fully_shard`` or ``replicate`` (FSDP2) was called with, it compresses the average
    of this rank's shards over its replicas, after FSDP2's own reduce-scatter.

    Every rank of the group must call it. If a rank does not, all ranks raise an error that names
    it.

    Args:
        module: A DDP module, or the root of one that FSDP2 has sharded or replicated.
        options: Some fields of ``Options`` as a mapping, which is laid over the options of the
            process group, or a complete ``Options``, which replaces them. None takes them as they
            are.
        scaler: The GradScaler that the model is trained with, if any. The residuals then follow
            its scale, and keep what was sent in a step that it skips.
        group: The group of the ranks that hold the same shards of an FSDP2 module, its replicas. It
            needs a powersgd backend for the parameters' device. A DDP module has its own group, as
            does an FSDP2 module whose mesh has a dimension of replicas.

    Raises:
        ValueError: If the module cannot be attached, the ranks' models or options differ, or a rank
            does not call ``attach``. It is raised on every rank, except if the group was destroyed
            on this rank.
    """
    known = _attachments.get(module) if isinstance(module, Module) else None
    if known is not None:
        agree(module, options, scaler, known.group, known.model)
        known.model.active = True
        _follow(module, known, scaler)
        return
    attachment = _new(module, options, scaler, group)
    if isinstance(module, FSDPModule):
        fsdp_hooks.set_hooks(module, attachment.model, attachment.group.size())
    else:
        set_hook(module, attachment.model)
    _keep(module, attachment, scaler)


def comm_hook(
    ddp: DistributedDataParallel,
    options: Options | Mapping[str, Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Hook:
    """Returns the hook that ``attach`` registers, for the caller to register. Collective.

    Some hooks of torch wrap another one, and DDP takes only one:

        hook = hook_with_zero_step(torch_powersgd.comm_hook(ddp), ddp, zero)
        ddp.register_comm_hook(None, hook)

    The arguments and errors are those of ``attach``. The module then counts as attached.
    """
    if ddp in _attachments:
        raise ValueError("this module is attached already; DDP takes only one hook")
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"comm_hook takes a DDP module, got {type(ddp).__name__}")
    attachment = _new(ddp, options, scaler, None)
    _keep(ddp, attachment, scaler)
    return python_hook(ddp, attachment.model)


def detach(module: Module) -> None:
    """Averages the module's gradients exactly from now on. Its state is kept for ``attach``.

    All ranks must call it between the same two steps.

    Raises:
        ValueError: If it is not attached.
    """
    attachment_of(module).model.active = False


def attached_groups() -> list[dist.ProcessGroup]:
    """Returns the groups of the attached modules, without duplicates."""
    groups = {id(attachment.group): attachment.group for attachment in _attachments.values()}
    return list(groups.values())


def attached_in(group: dist.ProcessGroup | None) -> list[_C.BucketReducer]:
    """Returns the reducers of the modules that are attached in a group. None: the default one."""
    group = group or dist.group.WORLD
    return [attachment.model for attachment in _attachments.values() if attachment.group is group]


def attachment_of(module: Module) -> Attachment:
    """Returns the record of an attached module.

    Raises:
        ValueError: If it is not attached.
    """
    attachment = _attachments.get(module) if isinstance(module, Module) else None
    if attachment is None:
        raise ValueError("this module is not attached; call torch_powersgd.attach(module) first")
    return attachment


def _new(
    module: Module,
    options: Options | Mapping[str, Any] | None,
    scaler: torch.amp.GradScaler | None,
    group: dist.ProcessGroup | None,
) -> Attachment:
    """Creates the record of a module that is not attached. Collective."""
    group = group_of_replicas(module, group)
    agreed = agree(module, options, scaler, group, None)
    names, parameters = list(agreed.parameters), list(agreed.parameters.values())
    model = _C.BucketReducer(agreed.backend, names, parameters, agreed.options._core())
    return Attachment(model, group)


def _keep(module: Module, attachment: Attachment, scaler: torch.amp.GradScaler | None) -> None:
    """Keeps the record of a module whose hooks are set, and announces it."""
    _attachments[module] = attachment
    announce(attachment.model, attachment.group)
    if isinstance(module, DistributedDataParallel):
        note_wrapper(module, attachment.model)
    if attachment.group.size() > 1:
        reduction_checks.check(module, attachment.model, warns=attachment.group.rank() == 0)
    _follow(module, attachment, scaler)


def _follow(module: Module, attachment: Attachment, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is not None and attachment.scaler is not scaler:
        attachment.scaler = scaler
        if isinstance(module, FSDPModule):
            parameters = fsdp.parameters_of(module)
        else:
            parameters = parameters_of(module)
        grad_scaler.follow(scaler, attachment.model.states, parameters)
