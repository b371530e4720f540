# SPDX-License-Identifier: BSD-3-Clause
"""Layer-by-layer compression of the gradients of a module that DDP or FSDP2 wraps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import fsdp
from torch_powersgd._core import _C
from torch_powersgd.announcement import announce
from torch_powersgd.loss_scale import follow
from torch_powersgd.options import Options
from torch_powersgd.proposal import Module, agree, group_of_replicas

# What torch calls for each bucket of a DDP module: hook(state, bucket).
Hook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]

_attached: WeakKeyDictionary[Module, _C.AttachedModel] = WeakKeyDictionary()
_groups: WeakKeyDictionary[Module, dist.ProcessGroup] = WeakKeyDictionary()
_scalers: WeakKeyDictionary[Module, torch.amp.GradScaler] = WeakKeyDictionary()


def attach(
    module: Module,
    options: Options | Mapping[str, Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compresses the gradients of a module layer by layer. Collective.

    Each weight is compressed by its own shape (shape[0] x the rest), and its state belongs to the
    parameter: it survives DDP's rebuilding of buckets and can be saved with ``state_dict``.
    Attaching again after ``detach`` goes on with the state that was kept.

    On a DDP module it registers a C++ communication hook, so that no Python runs in backward. On a
    module that ``fully_shard`` (FSDP2) has sharded it sets the all-reduce hooks: after FSDP2's own
    reduce-scatter, this rank's shards are averaged over its replicas.

    Every rank of the group must call it. A rank that does not is named on all ranks.

    Args:
        module: A DDP module, or the root of a module that was sharded on a mesh of one dimension.
        options: Some fields of ``Options`` as a mapping, which is laid over the options of the
            process group, or a complete ``Options``, which replaces them. None takes them as they
            are.
        scaler: The GradScaler that the model is trained with, if any. The residuals then follow
            its scale, and keep what was sent in a step that it skips.
        group: The replicas of an FSDP2 module: the group of the ranks that hold the same shards. It
            needs a powersgd backend for the parameters' device. A DDP module has its own group.

    Raises:
        ValueError: If the module cannot be attached, the ranks' models or options differ, or a rank
            does not call ``attach``. It is raised on every rank.
    """
    again = isinstance(module, Module) and module in _attached
    model = _model_of(module, options, scaler, group)
    if again:
        model.active = True
    elif isinstance(module, FSDPModule):
        fsdp.set_hooks(module, model, _groups[module].size())
    else:
        _register_hook(module, model)
    if not again:
        announce(model, _groups[module])
    _follow(module, model, scaler)


def comm_hook(
    ddp: DistributedDataParallel,
    options: Options | Mapping[str, Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> Hook:
    """The hook that ``attach`` registers, for the caller to register. Collective.

    Some hooks of torch wrap another one, and DDP takes only one:

        hook = hook_with_zero_step(torch_powersgd.comm_hook(ddp), ddp, zero)
        ddp.register_comm_hook(None, hook)

    The arguments and errors are those of ``attach``. The module then counts as attached.
    """
    if ddp in _attached:
        raise ValueError("this module is attached already; DDP takes only one hook")
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"comm_hook takes a DDP module, got {type(ddp).__name__}")
    model = _model_of(ddp, options, scaler, None)
    announce(model, _groups[ddp])
    _follow(ddp, model, scaler)
    reference = weakref.ref(ddp)  # which owns the hook

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        module = reference()
        assert module is not None
        future = model.reduce_bucket(module.reducer, bucket).get_future()
        return future.then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # DDP compares them with types; these are strings
    return hook


def detach(module: Module) -> None:
    """Averages the module's gradients exactly from now on. Its state is kept for ``attach``.

    All ranks must call it between the same two steps.

    Raises:
        ValueError: If it is not attached.
    """
    attached_model(module).active = False


def step_skipped(module: Module) -> None:
    """Says that the optimizer did not apply the gradients of the last synchronised backward pass.

    The residuals keep what they delivered, and deliver it again. All ranks must call it after the
    backward pass and before the next one. ``attach(module, scaler=...)`` does it by itself.

    Raises:
        ValueError: If the module is not attached.
    """
    attached_model(module).step_skipped()


def attached_model(module: Module) -> _C.AttachedModel:
    """The core's side of an attached module.

    Raises:
        ValueError: If it is not attached.
    """
    model = _attached.get(module)
    if model is None:
        raise ValueError("this module is not attached; call torch_powersgd.attach(module) first")
    return model


def group_of(module: Module) -> dist.ProcessGroup:
    """The group over which an attached module's gradients are averaged."""
    return _groups[module]


def _model_of(
    module: Module,
    options: Options | Mapping[str, Any] | None,
    scaler: torch.amp.GradScaler | None,
    group: dist.ProcessGroup | None,
) -> _C.AttachedModel:
    """The core's side of a module, made if it is new. Collective."""
    known = _attached.get(module) if isinstance(module, Module) else None
    group = _groups[module] if known is not None else group_of_replicas(module, group)
    agreed = agree(module, options, scaler, group, known)
    if known is not None:
        return known
    parameters = agreed.parameters
    model = _C.AttachedModel(
        agreed.backend, list(parameters), list(parameters.values()), agreed.options._core()
    )
    _groups[module], _attached[module] = group, model
    return model


def _follow(module: Module, model: _C.AttachedModel, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is not None and _scalers.get(module) is not scaler:
        assert isinstance(module, torch.nn.Module)
        _scalers[module] = scaler
        follow(scaler, model, list(module.parameters()))


def _register_hook(ddp: DistributedDataParallel, model: _C.AttachedModel) -> None:
    try:
        _C.register_ddp_hook(ddp.reducer, model)
    except RuntimeError as error:
        del _attached[ddp], _groups[ddp]
        if "register_comm_hook" not in str(error):
            raise
        raise ValueError(
            "this DDP module has a communication hook already; it takes only one"
        ) from error
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name("torch_powersgd")
