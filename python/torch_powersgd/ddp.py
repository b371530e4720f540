# SPDX-License-Identifier: BSD-3-Clause
"""Layer-by-layer compression of a DistributedDataParallel module."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd._backend import compare_options, find_backend, set_default_backend
from torch_powersgd._core import _C
from torch_powersgd.options import Options

_attached: WeakKeyDictionary[DistributedDataParallel, _C.AttachedModel] = WeakKeyDictionary()


def attach(ddp: DistributedDataParallel, options: Options | None = None) -> None:
    """Compresses the gradients of a DDP module layer by layer. Collective.

    Registers a C++ communication hook on the module, so that no Python runs in backward. Each
    weight is compressed by its own shape (shape[0] x the rest), and its state belongs to the
    parameter: it survives DDP's rebuilding of buckets and can be saved with ``state_dict``.
    Attaching again after ``detach`` goes on with the state that was kept.

    Args:
        ddp: a module whose process group has a powersgd backend for its parameters' device.
        options: None: those of the process group.

    Raises:
        ValueError: on every rank alike, if the module cannot be attached or the ranks' models or
            options differ.
    """
    _check_module(ddp)
    parameters = {
        name: parameter
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    }
    device = next(iter(parameters.values())).device
    backend = find_backend(ddp.process_group, device)
    if backend is None:
        raise ValueError(
            f"attach needs a process group with the powersgd backend for {device.type}; this "
            f"module's has {ddp.process_group._get_backend(device).name()!r}. Use "
            f'init_process_group("{device.type}:powersgd")'
        )
    set_default_backend(ddp.process_group)
    core = options._core() if options is not None else backend.options.compression
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    _check_agreement(ddp.process_group, core, shapes)
    model = _attached.get(ddp)
    if model is not None:
        if _fields(model.options) != _fields(core):
            raise ValueError("options of a module that was attached before cannot be changed")
        model.active = True
        return
    try:
        _attached[ddp] = _C.attach(
            ddp.reducer, backend, list(parameters), list(parameters.values()), core
        )
    except RuntimeError as error:
        if "register_comm_hook" not in str(error):
            raise
        raise ValueError(
            "this DDP module has a communication hook already; it takes only one"
        ) from error
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name("torch_powersgd")


def detach(ddp: DistributedDataParallel) -> None:
    """Averages the module's gradients exactly from now on. Its state is kept for ``attach``.

    To be called on all ranks between the same two steps.

    Raises:
        ValueError: if it is not attached.
    """
    attached_model(ddp).active = False


def attached_model(ddp: DistributedDataParallel) -> _C.AttachedModel:
    """The core's side of an attached module.

    Raises:
        ValueError: if it is not attached.
    """
    model = _attached.get(ddp)
    if model is None:
        raise ValueError("this module is not attached; call torch_powersgd.attach(ddp) first")
    return model


def _check_module(ddp: object) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise ValueError(f"attach takes a DistributedDataParallel module, got {type(ddp).__name__}")
    if ddp.mixed_precision is not None:
        raise ValueError(
            "attach does not work with DDP's own mixed_precision, which takes the one hook that "
            "DDP has; use torch.autocast instead"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "attach does not work with torch._dynamo.config.optimize_ddp = 'python_reducer', with "
            "which DDP reduces without its reducer and calls no C++ hook; use True, the default"
        )


def _fields(core: _C.Options) -> dict[str, Any]:
    return {name: getattr(core, name) for name in Options.__dataclass_fields__}


def _check_agreement(
    group: dist.ProcessGroup, core: _C.Options, shapes: dict[str, list[int]]
) -> None:
    mine = {**_fields(core), "parameters": shapes}
    everyone: list[dict[str, Any]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    verdict = compare_options(everyone)
    if verdict:
        raise ValueError(verdict)
