# SPDX-License-Identifier: BSD-3-Clause
"""A thread on each rank, which says that others wait for this rank to call ``attach``.

A rank that waits in ``attach`` for longer than ``PATIENCE`` leaves a note in the group's store. The
thread reads it, as long as its own rank has not called ``attach``. If that rank has issued
collectives in the meantime, it has gone past the call, and the others stop waiting.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from torch_powersgd import log
from torch_powersgd.agreement import (
    CollectiveCall,
    calls_of,
    calls_store,
    fail,
    next_call,
    store_of_call,
)
from torch_powersgd.lookup import find_backends

if TYPE_CHECKING:
    from torch_powersgd._core import _C

PERIOD = 2.0  # Seconds between two reads of the store.
LONGEST_WATCH = 600.0  # Seconds after which the thread leaves an unattached group alone.

_LATE = "late"
_ATTACH = "attach"

# The groups for which this rank has called attach.
_attached: WeakSet[dist.ProcessGroup] = WeakSet()
# The time at which the thread stops to watch a group.
_until: WeakKeyDictionary[dist.ProcessGroup, float] = WeakKeyDictionary()
# The groups for which a warning has named this rank.
_named: WeakSet[dist.ProcessGroup] = WeakSet()
_stop = threading.Event()
_thread: threading.Thread | None = None


def attach_call(group: dist.ProcessGroup, backend: _C.BackendPowerSGD | None) -> CollectiveCall:
    """This rank's next call of ``attach``, which is collective.

    Args:
        group: Group of the module.
        backend: The group's powersgd backend, if it has one.
    """
    _attached.add(group)
    calls = calls_store(group, _ATTACH)

    def leave_note(call: CollectiveCall, absent: list[int]) -> str:
        number = calls_of(calls, call.rank)
        note = {"rank": dist.get_rank(), "call": number, "sequence": _sequence_of(backend)}
        calls.set(_LATE, json.dumps(note))
        return ""

    timeout = default_pg_timeout if backend is None else backend.options._timeout
    return next_call(group, _ATTACH, timeout, leave_note)


def start() -> None:
    """Starts the thread, unless it runs already."""
    global _thread
    if _thread is None:
        _thread = threading.Thread(target=_watch, name="torch_powersgd watch", daemon=True)
        _thread.start()
        # The interpreter must not end while the thread is inside the store.
        atexit.register(_end)


def _end() -> None:
    _stop.set()
    assert _thread is not None
    _thread.join(1.0)


def _watch() -> None:
    while not _stop.wait(PERIOD):
        _check_groups()  # A function of its own: no variable keeps a group alive while it waits.


def _check_groups() -> None:
    for group, backend in _unattached():
        try:
            _check_group(group, backend)
        except RuntimeError:  # The store has gone, and so has the job.
            _until[group] = 0.0


def _unattached() -> Iterator[tuple[dist.ProcessGroup, _C.BackendPowerSGD]]:
    """The groups in which this rank has not called ``attach``."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group in _attached:
            continue
        now = time.monotonic()
        if now > _until.setdefault(group, now + LONGEST_WATCH):
            continue
        try:
            yield group, find_backends(group)[0]
        except ValueError:  # The group has other backends.
            _until[group] = 0.0


def _check_group(group: dist.ProcessGroup, backend: _C.BackendPowerSGD) -> None:
    calls = calls_store(group, _ATTACH)
    if not calls.check([_LATE]):
        return
    note = json.loads(calls.get(_LATE))
    if note["call"] <= calls_of(calls, group.rank()):
        return
    message = f"rank {dist.get_rank()} has not called attach, in which rank {note['rank']} waits"
    if _sequence_of(backend) > note["sequence"]:
        message += ", and has gone on to other collectives: every rank must call attach"
        fail(store_of_call(calls, note["call"]), message)
        _until[group] = 0.0
    elif group in _named:
        return
    _named.add(group)
    log.warning(message)


def _sequence_of(backend: _C.BackendPowerSGD | None) -> int:
    """The number of collectives that this rank has issued, or 0 if nothing counts them."""
    try:
        return int(backend._get_sequence_number_for_group()) if backend is not None else 0
    except RuntimeError:  # The inner backend does not count them.
        return 0
