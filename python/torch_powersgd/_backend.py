# SPDX-License-Identifier: BSD-3-Clause
"""Registration with torch.distributed, and the creation of a backend with its inner backends."""

from __future__ import annotations

import atexit
import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _DistributedBackendOptions

from torch_powersgd import log
from torch_powersgd._core import _C
from torch_powersgd.agreement import equality_of
from torch_powersgd.collective_call import CollectiveCall, count_call, store_of_call
from torch_powersgd.group_backends import (
    PLAIN_BACKENDS,
    device_types,
    find_backend,
    served_device_types,
)
from torch_powersgd.hosts import numbered, this_host
from torch_powersgd.option_values import must_be, require
from torch_powersgd.options import Options, resolve, to_core, to_plain

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend, Store

NAME = "powersgd"
STREAM_ORDERED = {"nccl"}  # Collectives of these backends do not block the host.


def register() -> None:
    """Registers the backend for CPU and CUDA, unless it is registered already."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    # To set a group's default backend, torch searches its backends for the first plugin's key. An
    # upper-case key never matches, so a group made from a "device:backend" string has no default
    # backend and warns when it is destroyed. A lower-case key in front does match.
    dist.Backend._plugins = {NAME: dist.Backend._plugins[NAME.upper()], **dist.Backend._plugins}
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Ends a job that does not call destroy_process_group."""
    try:
        for group in list(dist.distributed_c10d._world.pg_map):
            for device in device_types():
                backend = find_backend(group, torch.device(device))
                if backend is not None and (message := backend.not_started()):
                    log.of(group).warning(message)
    finally:
        # No worker may be inside a collective while the interpreter ends.
        _C.shutdown_at_exit()


def _log(warning: bool, message: str) -> None:
    (log.warning if warning else log.info)(message)


def create(dist_options: _DistributedBackendOptions, pg_options: object) -> _C.BackendPowerSGD:
    """Creates this rank's backend for a process group. torch calls this an extended creator."""
    rank, size = dist_options.group_rank, dist_options.group_size
    groups = PrefixStore("powersgd", dist_options.store)
    store = store_of_call(groups, count_call(groups, rank))
    options, hosts = _agree(dist_options, store, pg_options)
    inners = []
    for device in served_device_types(NAME):
        name = _inner_name(options, device)
        inner = _create_inner(name, PrefixStore(f"{device}/inner", store), dist_options)
        # A backend that blocks the host needs a separate instance for the engine's thread.
        blocks = name not in STREAM_ORDERED
        connect = functools.partial(_connect_engine, name, dist_options) if blocks else None
        inners.append((device, inner, connect, PrefixStore(f"{device}/engine", store)))
    return _C.BackendPowerSGD(rank, size, inners, to_core(options), _log, hosts)


def _agree(
    dist_options: _DistributedBackendOptions, store: Store, pg_options: object
) -> tuple[Options, list[int]]:
    """Returns this rank's options, and the number of each rank's host.

    All ranks then have the same valid options and the same kernels.

    It isn't known yet which device's kernels will run. That doesn't matter, because ranks with
    tensors on different device types never exchange payloads: each type has its own inner backend.

    Raises:
        ValueError: On every rank alike, if any rank's options are invalid or two ranks' differ, or
            if a rank creates a group of another backend.
    """

    def make() -> tuple[Options, dict[str, Any]]:
        options = resolve(pg_options)
        mine = {"kernels": _C.kernels_version, **to_plain(options)}
        return options, {"host": this_host(), "compared": mine}

    def other_backend(call: CollectiveCall, absent: list[int]) -> str:
        # A gloo group created instead of this one stores its address under this key.
        gloo = [rank for rank in absent if dist_options.store.check([f"0/{rank}"])]
        return (
            f"{call.names_of(gloo)} created a gloo process group instead of a powersgd one: pass "
            "the same backend to init_process_group on all ranks"
            if gloo
            else ""
        )

    call = CollectiveCall(
        PrefixStore("options", store),
        dist_options.group_rank,
        dist_options.global_ranks_in_group or range(dist_options.group_size),
        "created a powersgd process group",
        dist_options.timeout,
        other_backend,
    )
    return call.agree_on(
        make,
        lambda everyone: compare_options([given["compared"] for given in everyone]),
        lambda everyone: numbered([given["host"] for given in everyone]),
    )


def compare_options(everyone: list[dict[str, Any]]) -> str:
    """Returns an error message if options differ between ranks, or an empty string.

    "kernels" is the version of the core and, in ``attach``, the kind of device.
    Equal kernels compute bitwise identical P^ and Q from the same sums. The CPU's instruction set
    and the torch release may differ, because neither changes these bits.
    """
    first = everyone[0]["kernels"]
    for rank, given in enumerate(everyone):
        if given["kernels"] != first:
            return (
                f"all ranks of a powersgd group must run the same kernels: rank 0 has {first!r}, "
                f"rank {rank} has {given['kernels']!r}. Install one version of torch_powersgd "
                "everywhere, and use one type of device"
            )
    return equality_of("the options and POWERSGD_ variables of a powersgd group")(everyone)


def _inner_name(options: Options, device: str) -> str:
    name = options.inner
    if name == "auto":
        name = dist.Backend.default_device_backend_map[device]
        if name == NAME:  # set for libraries that look up their backend there
            name = PLAIN_BACKENDS[device]
    require(name != NAME, "inner", "the name of another backend, to wrap", name)
    return name


def _create_inner(name: str, store: Store, dist_options: _DistributedBackendOptions) -> Backend:
    """Creates an inner backend on a store of its own.

    Raises:
        ValueError: If there is no backend of this name.
    """
    rank, size = dist_options.group_rank, dist_options.group_size
    timeout: timedelta = dist_options.timeout
    group = {
        "global_ranks_in_group": dist_options.global_ranks_in_group or list(range(size)),
        "group_name": dist_options.group_id,
    }
    if name == "gloo" and dist.is_gloo_available():
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        _set(gloo.options, group)
        return cast("Backend", gloo)
    if name == "nccl" and dist.is_nccl_available():
        # NCCL runs exact collectives on its own stream. At low priority they would queue behind the
        # backward pass's kernels, and the engine's payloads behind them.
        nccl_options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        _set(nccl_options, {**group, "_timeout": timeout})
        return cast("Backend", dist.ProcessGroupNCCL(store, rank, size, nccl_options))
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is not None and plugin.extended_api:
        dist_options.store = store
        return cast("Backend", plugin.creator_fn(dist_options, None))
    if plugin is not None:
        return cast("Backend", plugin.creator_fn(store, rank, size, timeout))
    registered = ["gloo", "nccl", *(key.lower() for key in dist.Backend._plugins)]
    known = sorted(set(registered) - {NAME})
    raise must_be("inner", f"'auto' or a backend that this build of torch has, of {known}", name)


def _connect_engine(
    name: str,
    parent: _DistributedBackendOptions,
    store: Store,
    rank: int,
    size: int,
    timeout: timedelta | None,
) -> Backend:
    """Makes the backend for the engine of a group, or of a group split from it.

    The engine's thread calls it when the group first compresses.
    """
    group = _DistributedBackendOptions()
    group.group_rank, group.group_size = rank, size
    group.timeout = timeout or parent.timeout
    group.group_id = parent.group_id
    if size == parent.group_size:  # otherwise only the inner backend knows the ranks
        group.global_ranks_in_group = parent.global_ranks_in_group
    backend = _create_inner(name, store, group)
    if timeout is not None:  # it may be a single call's
        backend._set_default_timeout(parent.timeout)
    return backend


def _set(options: object, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(options, name, value)
