# SPDX-License-Identifier: BSD-3-Clause
"""The communication hooks of a DistributedDataParallel module."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from weakref import WeakSet

import torch
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd._core import _C

# torch calls hook(state, bucket) for each bucket of a DDP module.
Hook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]


in_local_steps: WeakSet[DistributedDataParallel] = WeakSet()  # which average no gradients

OWN_HOOK = "torch_powersgd"  # as DDP's log names it
ALREADY_ATTACHED = (
    "this module is already attached: use the Compression that attach returned, or call its "
    "detach() first"
)


def check_module(ddp: DistributedDataParallel) -> None:
    """Raises a ValueError if a hook cannot reduce the module's gradients."""
    if ddp in in_local_steps:
        raise ValueError(
            "this module takes local steps, which do their own compression: call their detach() "
            "first, or leave attach out"
        )
    if _C.is_attached(ddp.reducer):
        raise ValueError(ALREADY_ATTACHED)
    if ddp.mixed_precision is not None:
        raise ValueError(
            "attach does not work with DDP's mixed_precision, which uses DDP's only communication "
            "hook; use torch.autocast instead"
        )
    if getattr(ddp, "_use_python_reducer", False):
        raise ValueError(
            "attach does not work with torch._dynamo.config.optimize_ddp='python_reducer', which "
            "bypasses DDP's communication hooks; use True, the default"
        )

    if any(
        hasattr(parameter, "_in_backward_optimizers") for _, parameter in named_parameters_of(ddp)
    ):
        raise ValueError(
            "attach does not work with _apply_optimizer_in_backward, which uses DDP's only "
            "communication hook; call optimizer.step() after backward instead"
        )

    if error := conversion_error(ddp):
        raise ValueError(error)


def check_hook(ddp: DistributedDataParallel, replaceable: str = OWN_HOOK) -> None:
    """Raises a ValueError if the module has a communication hook that cannot be replaced."""
    name = ddp._get_ddp_logging_data().get("comm_hook")
    if name not in (None, replaceable):
        raise ValueError(
            f"this DDP module already has a communication hook ({name}), and DDP allows only one"
        )


def bucket_advice(ddp: DistributedDataParallel, gradient_bytes: int) -> str:
    """Returns advice if GPUs average in buckets of DDP's default size, which is for CPUs."""
    chosen = not getattr(ddp, "bucket_bytes_cap_default", False)
    if chosen or ddp.device_type != "cuda" or gradient_bytes <= ddp.bucket_bytes_cap:
        return ""
    return (
        "on GPUs, buckets of 100 MB take about a third off the time that averaging adds to a step: "
        "DistributedDataParallel(..., bucket_cap_mb=100)"
    )


def conversion_error(ddp: DistributedDataParallel) -> str:
    """Returns an error message if a conversion has removed DDP's hook from a parameter, or nothing.

    DDP's hook is on an autograd node, which half() and to() replace. No rank notices by itself.
    """
    index = _C.converted_parameter(ddp.reducer)
    if index is None:
        return ""
    lost = _C.reduced_parameters(ddp.reducer)[index]
    names = (f"'{name}'" for name, parameter in named_parameters_of(ddp) if parameter is lost)
    return (
        f"{next(names, 'a parameter')} was converted to another dtype or device after DDP wrapped "
        "the module, so DDP no longer averages its gradients and the ranks drift apart. Convert "
        "the module first (half(), to()), then wrap and attach it"
    )


def parameters_of(ddp: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Returns the parameters whose gradients DDP reduces: those trainable when it was created."""
    reduced = {id(parameter) for parameter in _C.reduced_parameters(ddp.reducer)}
    return {
        name: parameter for name, parameter in named_parameters_of(ddp) if id(parameter) in reduced
    }


def named_parameters_of(ddp: DistributedDataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's parameters, except those that DDP was told to ignore or reduces by itself."""
    for name, parameter in ddp.module.named_parameters():
        if name not in ddp.parameters_to_ignore:
            yield name, parameter


def register_hook(ddp: DistributedDataParallel, reducer: _C.BucketReducer) -> None:
    """Registers the C++ hook, which reduces each bucket through ``reducer``."""
    _C.register_ddp_hook(ddp.reducer, reducer)
    if ddp.logger is not None:
        ddp.logger._set_comm_hook_name(OWN_HOOK)


def python_hook(ddp: DistributedDataParallel, reducer: _C.BucketReducer) -> Hook:
    """Returns a Python hook that does the same as the C++ hook."""
    reference = weakref.ref(ddp)  # The module owns the hook.
    buckets = _C.DdpBuckets(reducer, ddp.reducer)

    def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        module = reference()
        assert module is not None
        future = buckets.reduce(module.reducer, bucket).get_future()
        return future.then(lambda done: done.value()[0])

    hook.__annotations__.clear()  # DDP compares them with types, and these are strings.
    return hook
