# SPDX-License-Identifier: BSD-3-Clause
"""What a process proposes in ``attach``, checked and agreed on with the others. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from torch_powersgd import agreement
from torch_powersgd._backend import compare_options
from torch_powersgd._core import _C
from torch_powersgd.attachment import Attachment
from torch_powersgd.group_backends import find_backend
from torch_powersgd.option_values import dtype_name, require
from torch_powersgd.options import Options, check_matrix_ranks, from_core, lay_over, to_plain
from torch_powersgd.targets import Target, TensorsByName
from torch_powersgd.targets.fsdp import compare_places


@dataclass(frozen=True)
class Proposal:
    """The arguments that one process brings to ``attach``.

    Attributes:
        backend: Backend of the group.
        options: Options of the gradients.
        gradients: Tensors with the shapes, dtypes and devices of the gradients, by name.
        place: The part of the gradients that this process holds.
    """

    backend: _C.BackendPowerSGD
    options: Options
    gradients: dict[str, torch.Tensor]
    place: dict[str, Any]

    @property
    def described(self) -> list[str]:
        """The gradients in words."""
        return described(self.gradients)

    def plain(self) -> dict[str, Any]:
        """Returns the arguments in JSON types."""
        devices = sorted({_kind_of(gradient.device) for gradient in self.gradients.values()})
        kernels = f"{' and '.join(devices)} {_C.kernels_version}"
        options = {"kernels": kernels, **to_plain(self.options)}
        return {"options": options, "gradients": self.described, "place": self.place}


def _kind_of(device: torch.device) -> str:
    """The type of the device and, of a GPU, its compute capability.

    The compute capability selects the instructions for a sum, such as those of double-precision
    tensor cores, and so decides the bits that all processes must agree on.
    """
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda sm_{major}{minor}"


@dataclass(frozen=True)
class Source:
    """The process whose factors all processes take over, and its step."""

    rank: int
    step: int


def agree(
    target: Target,
    given: Options | Mapping[str, Any] | None,
    scaler: torch.amp.GradScaler | None,
    group: dist.ProcessGroup,
    previous: Attachment | None = None,
    register_hook: bool = False,
) -> tuple[Proposal, Source | None]:
    """Returns this process's proposal once all processes have made the same one. Collective.

    Also returns the process to take the factors from, if any process takes over a compression: the
    first of those with the most steps.

    Args:
        target: Gradients to compress.
        given: Options of ``attach``.
        scaler: GradScaler of ``attach``.
        group: Group to average over.
        previous: What this process takes over.
        register_hook: Whether ``attach`` will register the hooks.

    Raises:
        ValueError: On every process, if a proposal is invalid or differs from that of rank 0, or a
            process makes none. On this process only, if the group was destroyed here.
    """

    def make() -> tuple[Proposal, dict[str, Any]]:
        proposal = _propose(target, given, scaler, group, previous)
        if register_hook:
            target.check_hook()
        plain = proposal.plain()
        if previous is not None and previous.kept is not None:
            plain["step"] = previous.kept.states.step
        return proposal, plain

    proposal, source = agreement.agree(group, "attach", make, _compare, _source)
    return proposal, Source(*source) if source else None


def _source(everyone: list[dict[str, Any]]) -> tuple[int, int] | None:
    steps = ((rank, given["step"]) for rank, given in enumerate(everyone) if "step" in given)
    return max(steps, key=lambda of: of[1], default=None)


def _propose(
    target: Target,
    given: Options | Mapping[str, Any] | None,
    scaler: torch.amp.GradScaler | None,
    group: dist.ProcessGroup,
    previous: Attachment | None,
) -> Proposal:
    target.check()
    fits = isinstance(scaler, torch.amp.GradScaler | None)
    require(fits, "scaler", "a torch.amp.GradScaler", type(scaler))
    if scaler is not None and isinstance(target, TensorsByName):
        raise ValueError(
            "attach takes a scaler only with a module; with tensors, set compression.grad_scale "
            "instead"
        )
    gradients = target.gradients()
    if not gradients:
        raise ValueError(target.nothing)
    backend = _backend_of(group, next(iter(gradients.values())).device)
    if previous is None:
        base = from_core(backend.options.compression)
        options = lay_over(base, given, "options of attach")
        check_matrix_ranks(options, target.family())
        return Proposal(backend, options, gradients, target.place())
    if previous.kept is None:
        raise ValueError(f"previous can no longer be used: {previous.ended}")
    options = from_core(previous.kept.states.options)
    if lay_over(options, given, "options of attach") != options:
        raise ValueError(
            "attach(previous=...) keeps the options of previous: leave options out. To change "
            "them, use state_dict and load_state_dict"
        )
    proposal = Proposal(backend, options, gradients, target.place())
    if differing := first_difference(previous.described, proposal.described):
        before, now = differing
        raise ValueError(
            f"previous must have the same parameters in the same order, but it has {before} where "
            f"this module has {now}. To attach a changed model, use state_dict and load_state_dict"
        )
    return proposal


def _compare(everyone: list[dict[str, Any]]) -> str:
    return (
        compare_places([given["place"] for given in everyone])
        or compare_options([given["options"] for given in everyone])
        or _compare_gradients([given["gradients"] for given in everyone])
    )


def _compare_gradients(everyone: list[list[str]]) -> str:
    for rank, gradients in enumerate(everyone):
        if differing := first_difference(everyone[0], gradients):
            first, mine = differing
            return (
                "all ranks must attach the same parameters in the same order, but rank 0 has "
                f"{first} where rank {rank} has {mine}"
            )
    return ""


def described(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns named tensors in words."""
    return [
        f"{name!r} {dtype_name(tensor.dtype)} {list(tensor.shape)}"
        for name, tensor in tensors.items()
    ]


def first_difference(one: list[str], other: list[str]) -> tuple[str, str] | None:
    """Returns the first items that differ, or None."""
    pairs = zip_longest(one, other, fillvalue="nothing")
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> _C.BackendPowerSGD:
    backend = find_backend(group, device)
    if backend is None:
        name = f"{device.type}:powersgd"
        raise ValueError(
            f"attach needs a process group with the powersgd backend for {device.type}; this one "
            f'has {group._get_backend(device).name()!r}. Call init_process_group("{name}") before '
            "Accelerator, Trainer or anything else creates the group; for a dimension of a device "
            f'mesh, init_device_mesh(..., backend_override={{"replicate": "{name}"}})'
        )
    if not _C.has_kernels(device.type):
        raise ValueError(
            f"torch_powersgd was built without kernels for {device.type}: rebuild it with "
            "POWERSGD_BUILD_CUDA=1, which reports what is missing (set CUDA_HOME to the CUDA "
            "toolkit)"
        )
    return backend
