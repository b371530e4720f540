# SPDX-License-Identifier: BSD-3-Clause
"""The powersgd backends of a process group."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from torch_powersgd._core import _C
from torch_powersgd.option_values import require

# The backend string of a job whose gradients are on this type of device.
BACKENDS = {"cpu": "cpu:powersgd", "cuda": "cpu:gloo,cuda:powersgd"}
# The backend that such a job has without this package, and that inner="auto" wraps.
PLAIN_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def device_types() -> list[str]:
    """The device types that this process has."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def served_device_types(name: str) -> list[str]:
    """The device types that the backend of this name, which torch is creating, will serve.

    torch doesn't tell a backend's creator, so this looks in the frame of the calling function. If
    that isn't found, it returns every type that this process has.
    """
    frame = inspect.currentframe()
    # Skip this frame: its locals would refer to the frame itself, a cycle that keeps the group.
    while frame is not None and (frame := frame.f_back) is not None:
        config = frame.f_locals.get("backend_config")
        if isinstance(config, dist.distributed_c10d.BackendConfig):
            backends = config.get_device_backend_map()
            return [d for d in device_types() if backends.get(d) == name] or device_types()
    return device_types()


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or the default group for None. It raises a ValueError if it is neither."""
    group = group if group is not None else dist.group.WORLD
    if group is None:
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group first"
        )
    is_group = isinstance(group, dist.ProcessGroup)  # torch returns -100 on ranks outside it.
    require(is_group, "group", "a process group that this process belongs to", group)
    return group


def find_backend(
    group: dist.ProcessGroup | None, device: torch.device
) -> _C.BackendPowerSGD | None:
    """Returns the powersgd backend that serves a device in a group, if there is one.

    A group of None is the default group.
    """
    try:
        backend = group_or_default(group)._get_backend(device)
    except RuntimeError:  # No backend serves this type of device.
        return None
    # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every backend in one that checks the calls.
    backend = getattr(backend, "wrapped_pg", backend)
    return backend if isinstance(backend, _C.BackendPowerSGD) else None


def check_alive(group: dist.ProcessGroup) -> None:
    """Raises a ValueError if the group was destroyed or aborted.

    The other ranks aren't told, because the store for that may be gone.
    """
    if any(backend.ended for backend in _backends_of(group)):
        raise ValueError(
            "the process group of this module was destroyed or aborted: create a new group, wrap "
            "the module in DDP again, and attach the new wrapper"
        )


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the timeout of a powersgd group, or torch's default for another group."""
    timeouts = (backend.options._timeout for backend in _backends_of(group))
    return next(timeouts, default_pg_timeout)


def global_ranks(group: dist.ProcessGroup) -> Sequence[int]:
    """The group's global ranks, or 0, 1, ... if torch doesn't know them."""
    # A group that ProcessGroup.split_group made is not registered.
    known = group in dist.distributed_c10d._world.pg_group_ranks
    return dist.get_process_group_ranks(group) if known else range(group.size())


def find_backends(group: dist.ProcessGroup | None) -> list[_C.BackendPowerSGD]:
    """Returns all powersgd backends of a group.

    Raises:
        ValueError: If the group has none.
    """
    found = _backends_of(group)
    if not found:
        raise ValueError(
            "the process group has no powersgd backend; create it with the backend "
            '"cpu:powersgd" or "cpu:gloo,cuda:powersgd"'
        )
    return found


def _backends_of(group: dist.ProcessGroup | None) -> list[_C.BackendPowerSGD]:
    found: list[_C.BackendPowerSGD] = []
    for device in device_types():
        backend = find_backend(group, torch.device(device))
        if backend is not None and all(backend is not other for other in found):
            found.append(backend)
    return found
