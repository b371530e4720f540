# SPDX-License-Identifier: BSD-3-Clause
"""Layer-by-layer compression of the gradients of a module that DDP or FSDP2 wraps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd import fsdp, watch
from torch_powersgd._backend import compare_options, find_backend
from torch_powersgd._core import _C
from torch_powersgd.announcement import announce
from torch_powersgd.loss_scale import follow
from torch_powersgd.options import Options, lay_over

Module = DistributedDataParallel | FSDPModule
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

    Args:
        module: a DDP module, or the root of one that was sharded on a mesh of one dimension.
        options: None: those of the process group. A mapping of some fields of ``Options`` is laid
            over them; a complete ``Options`` replaces them.
        scaler: the GradScaler that the model is trained with, if any. The residuals then follow
            its scale, and keep what was sent in a step that it skips.
        group: of an FSDP2 module, its replicas: the group of the ranks that hold the same shards.
            A DDP module has its own. It needs a powersgd backend for the parameters' device.

    Raises:
        ValueError: on every rank alike, if the module cannot be attached, the ranks' models or
            options differ, or a rank does not call ``attach``, which is then named.
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
    """What ``attach`` registers, as a hook in Python that the caller registers. Collective.

    For torch's hooks that wrap another, of which DDP takes only one:

        hook = hook_with_zero_step(torch_powersgd.comm_hook(ddp), ddp, zero)
        ddp.register_comm_hook(None, hook)

    The arguments and what is raised are those of ``attach``. The module then counts as attached.
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

    To be called on all ranks between the same two steps.

    Raises:
        ValueError: if it is not attached.
    """
    attached_model(module).active = False


def step_skipped(module: Module) -> None:
    """Says that the optimizer did not apply the gradients of the last synchronised backward pass.

    What they delivered stays in the residuals and is delivered again. To be called on all ranks,
    after the backward pass and before the next; ``attach(module, scaler=...)`` does it by itself.

    Raises:
        ValueError: if the module is not attached.
    """
    attached_model(module).step_skipped()


def attached_model(module: Module) -> _C.AttachedModel:
    """The core's side of an attached module.

    Raises:
        ValueError: if it is not attached.
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
    group = _groups[module] if known is not None else _group_of(module, group)
    proposal, error = None, ""
    try:
        proposal = _propose(module, options, scaler, group, known)
    except ValueError as invalid:
        error = str(invalid)
    meeting = watch.meet(group, proposal.backend if proposal is not None else None)
    if proposal is None:
        meeting.agree({"error": error}, _compare)
        raise ValueError(error)
    meeting.agree(proposal.plain(), _compare)
    if known is not None:
        return known
    model = _C.AttachedModel(
        proposal.backend,
        list(proposal.parameters),
        list(proposal.parameters.values()),
        proposal.options._core(),
    )
    _groups[module], _attached[module] = group, model
    return model


@dataclass(frozen=True)
class _Proposal:
    """What one rank brings to ``attach``."""

    backend: _C.BackendPowerSGD
    options: Options
    parameters: dict[str, torch.Tensor]
    place: dict[str, Any]  # of its shards, if FSDP2 has sharded the module

    def plain(self) -> dict[str, Any]:
        """What the ranks must agree on, in JSON types."""
        shapes = {name: list(parameter.shape) for name, parameter in self.parameters.items()}
        return {"options": {**self.options._plain(), "parameters": shapes}, "place": self.place}


def _propose(
    module: Module,
    given: Options | Mapping[str, Any] | None,
    scaler: torch.amp.GradScaler | None,
    group: dist.ProcessGroup,
    known: _C.AttachedModel | None,
) -> _Proposal:
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
    return _Proposal(backend, options, parameters, place)


def _compare(everyone: list[dict[str, Any]]) -> str:
    return fsdp.compare_places([given["place"] for given in everyone]) or compare_options(
        [given["options"] for given in everyone]
    )


def _follow(module: Module, model: _C.AttachedModel, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is not None and _scalers.get(module) is not scaler:
        assert isinstance(module, torch.nn.Module)
        _scalers[module] = scaler
        follow(scaler, model, list(module.parameters()))


def _parameters_of(module: Module) -> dict[str, torch.Tensor]:
    if isinstance(module, FSDPModule):
        return fsdp.shards_of(module)
    return {
        name: parameter
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in module.parameters_to_ignore
    }


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


def _group_of(module: object, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of replicas; raises a ValueError if the module has none that is known."""
    if isinstance(module, FSDPModule):
        return fsdp.group_of(module, group)
    if not isinstance(module, DistributedDataParallel):
        raise ValueError(
            "attach takes a DistributedDataParallel module or one that fully_shard has sharded, "
            f"got {type(module).__name__}"
        )
    if group is not None and group is not module.process_group:
        raise ValueError("attach takes a group only for FSDP2: a DDP module has one")
    process_group: dist.ProcessGroup = module.process_group
    return process_group


def _check_module(module: Module) -> None:
    """Raises a ValueError if the module's gradients cannot be reduced by a hook."""
    if isinstance(module, FSDPModule):
        return fsdp.check_module(module)
    if module.mixed_precision is not None:
        raise ValueError(
            "attach does not work with DDP's own mixed_precision, which takes the one hook that "
            "DDP has; use torch.autocast instead"
        )
    if getattr(module, "_use_python_reducer", False):
        raise ValueError(
            "attach does not work with torch._dynamo.config.optimize_ddp = 'python_reducer', with "
            "which DDP reduces without its reducer and calls no C++ hook; use True, the default"
        )


def option_fields(core: _C.Options) -> dict[str, Any]:
    """The core's options as {field: value}."""
    return {name: getattr(core, name) for name in Options.__dataclass_fields__}
