# SPDX-License-Identifier: BSD-3-Clause
"""Layer-by-layer compression of a DistributedDataParallel module."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd._backend import compare_options, find_backend, set_default_backend
from torch_powersgd._core import _C
from torch_powersgd.loss_scale import follow
from torch_powersgd.options import Options

_attached: WeakKeyDictionary[DistributedDataParallel, _C.AttachedModel] = WeakKeyDictionary()
_scalers: WeakKeyDictionary[DistributedDataParallel, torch.amp.GradScaler] = WeakKeyDictionary()


def attach(
    ddp: DistributedDataParallel,
    options: Options | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Compresses the gradients of a DDP module layer by layer. Collective.

    Registers a C++ communication hook on the module, so that no Python runs in backward. Each
    weight is compressed by its own shape (shape[0] x the rest), and its state belongs to the
    parameter: it survives DDP's rebuilding of buckets and can be saved with ``state_dict``.
    Attaching again after ``detach`` goes on with the state that was kept.

    Args:
        ddp: a module whose process group has a powersgd backend for its parameters' device.
        options: None: those of the process group.
        scaler: the GradScaler that the model is trained with, if any. The residuals then follow
            its scale, and keep what was sent in a step that it skips.

    Raises:
        ValueError: on every rank alike, if the module cannot be attached or the ranks' models or
            options differ.
    """
    _check_module(ddp)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ValueError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
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
    if not _C.has_kernels(device.type):
        raise ValueError(
            f"this build of torch_powersgd has no kernels for {device.type}: build it again with "
            "the CUDA toolkit at hand (CUDA_HOME) and POWERSGD_BUILD_CUDA=1, which says what is "
            "missing"
        )
    set_default_backend(ddp.process_group)
    core = options._core() if options is not None else backend.options.compression
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    _check_agreement(ddp.process_group, core, shapes)
    if ddp in _attached:
        _attach_again(_attached[ddp], core)
    else:
        _attached[ddp] = _register_hook(ddp, backend, parameters, core)
    if scaler is not None and _scalers.get(ddp) is not scaler:
        _scalers[ddp] = scaler
        follow(scaler, _attached[ddp], list(parameters.values()))


def detach(ddp: DistributedDataParallel) -> None:
    """Averages the module's gradients exactly from now on. Its state is kept for ``attach``.

    To be called on all ranks between the same two steps.

    Raises:
        ValueError: if it is not attached.
    """
    attached_model(ddp).active = False


def step_skipped(ddp: DistributedDataParallel) -> None:
    """Says that the optimizer did not apply the gradients of the last synchronised backward pass.

    What they delivered stays in the residuals and is delivered again. To be called on all ranks,
    after the backward pass and before the next; ``attach(ddp, scaler=...)`` does it by itself.

    Raises:
        ValueError: if the module is not attached.
    """
    attached_model(ddp).step_skipped()


def attached_model(ddp: DistributedDataParallel) -> _C.AttachedModel:
    """The core's side of an attached module.

    Raises:
        ValueError: if it is not attached.
    """
    model = _attached.get(ddp)
    if model is None:
        raise ValueError("this module is not attached; call torch_powersgd.attach(ddp) first")
    return model


def _attach_again(model: _C.AttachedModel, core: _C.Options) -> None:
    if option_fields(model.options) != option_fields(core):
        raise ValueError("options of a module that was attached before cannot be changed")
    model.active = True


def _register_hook(
    ddp: DistributedDataParallel,
    backend: _C.BackendPowerSGD,
    parameters: dict[str, torch.nn.Parameter],
    core: _C.Options,
) -> _C.AttachedModel:
    try:
        model = _C.attach(ddp.reducer, backend, list(parameters), list(parameters.values()), core)
    except RuntimeError as error:
        if "register_comm_hook" not in str(error):
            raise
        raise ValueError(
            "this DDP module has a communication hook already; it takes only one"
        ) from error
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name("torch_powersgd")
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


def option_fields(core: _C.Options) -> dict[str, Any]:
    """The core's options as {field: value}."""
    return {name: getattr(core, name) for name in Options.__dataclass_fields__}


def _check_agreement(
    group: dist.ProcessGroup, core: _C.Options, shapes: dict[str, list[int]]
) -> None:
    mine = {**option_fields(core), "parameters": shapes}
    everyone: list[dict[str, Any]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, mine, group=group)
    verdict = compare_options(everyone)
    if verdict:
        raise ValueError(verdict)
