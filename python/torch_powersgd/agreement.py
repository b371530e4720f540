# SPDX-License-Identifier: BSD-3-Clause
"""Calls that every rank of a group must make: agreement on their arguments, over the store.

The ranks exchange what they were given through the group's store and not by a collective. So a rank
that never comes can be named, and an error on one rank reaches all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore

from torch_powersgd import log

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# A rank that is so late is named in a warning. Then its key is looked for at this interval.
PATIENCE = timedelta(seconds=8)
INTERVAL = timedelta(seconds=0.5)

_VERDICT = "verdict"
_ABSENT = "absent"  # the ranks that rank 0 misses


@dataclass(frozen=True)
class Meeting:
    """One call that every rank of a group must make.

    Args:
        store: It holds the keys of this meeting alone.
        rank: This rank in the group.
        global_ranks: The ranks of the group as the whole job counts them.
        absence: The words after "rank 1" where that rank does not come: "has not called attach".
        timeout: The time after which waiting is an error.
        explain: A function of this meeting and the absent ranks. It is called once ``PATIENCE`` is
            over, and again at each ``INTERVAL``. It returns why they will not come, or nothing.
    """

    store: Store
    rank: int
    global_ranks: Sequence[int]
    absence: str
    timeout: timedelta
    explain: Callable[[Meeting, list[int]], str] = lambda meeting, absent: ""

    def agree(self, mine: dict[str, Any], compare: Callable[[list[dict[str, Any]]], str]) -> None:
        """Returns once all ranks have come and ``compare`` has found nothing to object to.

        Args:
            mine: The arguments of this rank in JSON types, or {"error": text} if they are invalid.
            compare: A function of the arguments of all ranks, which rank 0 calls. It returns the
                message of the error to raise, or nothing.

        Raises:
            ValueError: If a rank has an error, ``compare`` returns one, or a rank does not come. It
                is raised on every rank.
        """
        self.store.set(str(self.rank), json.dumps(mine))
        if self.rank == 0:
            # One rank compares and looks for absent ranks, so that n ranks make some n requests.
            everyone = [str(rank) for rank in range(len(self.global_ranks))]
            self._wait(everyone)
            if not self.store.check([_VERDICT]):
                given = [json.loads(self.store.get(key)) for key in everyone]
                self.store.set(_VERDICT, error_of(given) or compare(given))
        else:
            self._wait([_VERDICT])
        verdict = self.store.get(_VERDICT).decode()
        if verdict:
            raise ValueError(verdict)

    def absent(self) -> list[int]:
        """The ranks that have not come yet, as far as rank 0 has found out."""
        if self.rank == 0:
            everyone = range(len(self.global_ranks))
            found = [rank for rank in everyone if not self.store.check([str(rank)])]
            self.store.set(_ABSENT, json.dumps(found))
        elif not self.store.check(["0"]):
            found = [0]
        else:
            found = json.loads(self.store.get(_ABSENT)) if self.store.check([_ABSENT]) else []
        return found

    def names_of(self, ranks: list[int]) -> str:
        """ "rank 1" or "ranks 1, 2", as the whole job counts them; a few are named at most."""
        shown = ", ".join(str(self.global_ranks[rank]) for rank in ranks[:8])
        more = ", ..." if len(ranks) > 8 else ""
        return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"

    def _wait(self, keys: list[str]) -> None:
        """Waits for the keys, or for a verdict without them. Names who is late."""
        start = time.monotonic()
        try:
            self.store.wait(keys, min(PATIENCE, self.timeout))
            return
        except RuntimeError:  # its time-out has no type of its own in every kind of store
            named = False
        while not self.store.check(keys) and not self.store.check([_VERDICT]):
            late = self.absent()
            if late and not named:
                named = True
                me = self.names_of([self.rank])
                log.warning(f"{self.names_of(late)} {self.absence}; {me} waits")
            reason = self.explain(self, late) if late else ""
            seconds = self.timeout.total_seconds()
            if not reason and time.monotonic() - start > seconds:
                reason = f"{self.names_of(late or [0])} {self.absence} within {seconds:g} seconds"
            if reason:
                raise ValueError(reason)
            time.sleep(INTERVAL.total_seconds())


def count_call(store: Store, rank: int) -> int:
    """Counts a call of this rank: 1 for the first."""
    return store.add(f"calls/{rank}", 1)


def calls_of(store: Store, rank: int) -> int:
    """The number of calls that were counted."""
    return store.add(f"calls/{rank}", 0)


def store_of_call(store: Store, number: int) -> PrefixStore:
    """The part of the store that belongs to one call.

    A store may outlive a group. One that is made again must not find the keys of the first.
    """
    return PrefixStore(str(number), store)


def fail(store: Store, message: str) -> None:
    """Makes the ranks that wait in the meeting of this store raise a ValueError."""
    store.set(_VERDICT, message)


def error_of(everyone: list[dict[str, Any]]) -> str:
    """The message of the first rank that was given something invalid, or nothing."""
    errors = [given.get("error", "") for given in everyone]
    if errors[0] and len(set(errors)) == 1:
        return str(errors[0])
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), "")
