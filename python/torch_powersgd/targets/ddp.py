# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of a DistributedDataParallel module, and its communication hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from torch_powersgd._core import _C
from torch_powersgd.targets.target import ALREADY_ATTACHED, Target, shard_in

# torch calls hook(state, bucket) for each bucket of a DDP module.
Hook = Callable[[object, GradBucket], torch.futures.Future[torch.Tensor]]

in_local_steps: WeakSet[DistributedDataParallel] = WeakSet()  # which average no gradients

OWN_HOOK = "torch_powersgd"  # as DDP's log names it


class DdpTarget(Target):
    """The buckets of a DDP module."""

    nothing = (
        "this module shows no trainable parameters. A tensor-parallel module in DDP hides them "
        "from its first forward pass on: attach it before that"
    )

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module: DistributedDataParallel = module

    def group(self, given: dist.ProcessGroup | None) -> dist.ProcessGroup:
        own: dist.ProcessGroup = self.module.process_group
        if given is not None and given is not own:
            raise ValueError("leave group out: a DDP module has its own process group")
        return own

    def check(self) -> None:
        ddp = self.module
        if ddp in in_local_steps:
            raise ValueError(
                "this module takes local steps, which do their own compression: call their "
                "detach() first, or leave attach out"
            )
        if _C.is_attached(ddp.reducer):
            raise ValueError(ALREADY_ATTACHED)
        if ddp.mixed_precision is not None:
            raise ValueError(
                "attach does not work with DDP's mixed_precision, which uses DDP's only "
                "communication hook; use torch.autocast instead"
            )
        if getattr(ddp, "_use_python_reducer", False):
            raise ValueError(
                "attach does not work with torch._dynamo.config.optimize_ddp='python_reducer', "
                "which bypasses DDP's communication hooks; use True, the default"
            )
        if any(hasattr(p, "_in_backward_optimizers") for _, p in named_parameters_of(ddp)):
            raise ValueError(
                "attach does not work with _apply_optimizer_in_backward, which uses DDP's only "
                "communication hook; call optimizer.step() after backward instead"
            )
        if error := conversion_error(ddp):
            raise ValueError(error)

    def check_hook(self, replaceable: str = OWN_HOOK) -> None:
        name = self.module._get_ddp_logging_data().get("comm_hook")
        if name not in (None, replaceable):
            raise ValueError(
                f"this DDP module already has a communication hook ({name}), and DDP allows only "
                "one"
            )

    def parameters(self) -> dict[str, torch.Tensor]:
        # Those that were trainable when the wrapper was created.
        reduced = {*_C.reduced_parameters(self.module.reducer)}
        return {name: p for name, p in named_parameters_of(self.module) if p in reduced}

    def shard(self, group: dist.ProcessGroup) -> str:
        mesh = getattr(self.module, "device_mesh", None)
        if mesh is None or not mesh.mesh_dim_names:
            return ""
        # The other dimensions split the tensors (tensor parallelism) or the layers (a pipeline).
        whole = mesh._get_root_mesh()
        known = mesh.mesh_dim_names[0] in (whole.mesh_dim_names or ())
        return shard_in(whole, group) if known else ""

    def advice(self, gradient_bytes: int) -> str:
        ddp = self.module  # whose default size of buckets is for CPUs
        chosen = not getattr(ddp, "bucket_bytes_cap_default", False)
        if chosen or ddp.device_type != "cuda" or gradient_bytes <= ddp.bucket_bytes_cap:
            return ""
        return (
            "on GPUs, buckets of 100 MB take about a third off the time that averaging adds to a "
            "step: DistributedDataParallel(..., bucket_cap_mb=100)"
        )

    def register(self, reducer: _C.BucketReducer, group: dist.ProcessGroup) -> None:
        ddp = self.module
        _C.register_ddp_hook(ddp.reducer, reducer)
        if ddp.logger is not None:
            ddp.logger._set_comm_hook_name(OWN_HOOK)


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


def named_parameters_of(ddp: DistributedDataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's parameters, except those that DDP was told to ignore or reduces by itself."""
    for name, parameter in ddp.module.named_parameters():
        if name not in ddp.parameters_to_ignore:
            yield name, parameter


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
