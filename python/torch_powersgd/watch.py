# SPDX-License-Identifier: BSD-3-Clause
"""Names a rank that has not called ``attach`` while others wait for it, on that rank as well.

A rank that waits in ``attach`` for longer than ``PATIENCE`` leaves a note in the group's store. A
thread on each rank reads it, as long as the rank itself has not called ``attach``. If the rank has
issued collectives in the meantime, it has gone past the call, and the others stop waiting.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.constants import default_pg_timeout

from torch_powersgd import log
from torch_powersgd.agreement import Meeting, calls_of, count_call, fail, store_of_call

if TYPE_CHECKING:
    from torch_powersgd._core import _C

PERIOD = 2.0  # seconds between two looks at the store
# A group that nobody attaches to is left alone after so many seconds.
LONGEST_WATCH = 600.0

_LATE = "late"
_ATTACH = "attach"

# The groups for which this rank has called attach.
_attached: WeakSet[dist.ProcessGroup] = WeakSet()
# Until when a group is watched, and the groups of which this rank was named.
_until: WeakKeyDictionary[dist.ProcessGroup, float] = WeakKeyDictionary()
_named: WeakSet[dist.ProcessGroup] = WeakSet()
_stop = threading.Event()
_thread: threading.Thread | None = None


def meet(group: dist.ProcessGroup, backend: _C.BackendPowerSGD | None, call: str) -> Meeting:
    """The meeting of the group's ranks in this rank's next call of a function.

    Args:
        group: The group of the module.
        backend: Its powersgd backend, if it has one.
        call: The name of the function. Absent ranks of ``attach`` are looked for by the thread.
    """
    if call == _ATTACH:
        _attached.add(group)
    calls = _calls_store(group, call)
    number = count_call(calls, group.rank())

    def leave_note(meeting: Meeting, absent: list[int]) -> str:
        note = {"rank": dist.get_rank(), "call": number, "sequence": _sequence_of(backend)}
        calls.set(_LATE, json.dumps(note))
        return ""

    timeout = default_pg_timeout if backend is None else backend.options._timeout
    store, absence = store_of_call(calls, number), f"has not called {call}"
    return Meeting(store, group.rank(), _global_ranks(group), absence, timeout, leave_note)


def start() -> None:
    """Starts the thread, unless it runs."""
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
        _look_at_all()  # a function of its own: nothing keeps a group alive between two looks


def _look_at_all() -> None:
    for group, backend in _unattached():
        try:
            _look(group, backend)
        except RuntimeError:  # the store has gone: so has the job
            _until[group] = 0.0


def _unattached() -> Iterator[tuple[dist.ProcessGroup, _C.BackendPowerSGD]]:
    """The groups in which this rank has not called ``attach``."""
    from torch_powersgd._backend import find_backends

    for group in list(dist.distributed_c10d._world.pg_map):
        if group in _attached:
            continue
        now = time.monotonic()
        if now > _until.setdefault(group, now + LONGEST_WATCH):
            continue
        try:
            yield group, find_backends(group)[0]
        except ValueError:  # a group of other backends
            _until[group] = 0.0


def _look(group: dist.ProcessGroup, backend: _C.BackendPowerSGD) -> None:
    calls = _calls_store(group, _ATTACH)
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


def _global_ranks(group: dist.ProcessGroup) -> Sequence[int]:
    """The group's ranks as the whole job counts them, or from 0 on if torch does not know them."""
    # A group that ProcessGroup.split_group made is not registered.
    known = group in dist.distributed_c10d._world.pg_group_ranks
    return dist.get_process_group_ranks(group) if known else range(group.size())


def _calls_store(group: dist.ProcessGroup, call: str) -> PrefixStore:
    return PrefixStore(f"powersgd/{call}", group.get_group_store())


def _sequence_of(backend: _C.BackendPowerSGD | None) -> int:
    """How many collectives this rank has issued, as far as its inner backend counts them."""
    try:
        return int(backend._get_sequence_number_for_group()) if backend is not None else 0
    except RuntimeError:  # it does not count them
        return 0
