# SPDX-License-Identifier: BSD-3-Clause
"""A call that every rank of a group must make, and its agreement over the group's store.

Ranks exchange their arguments through the group's store and not by a collective. This way, a rank
that never calls can be named, and an error on one rank reaches all of them.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch._C._distributed_c10d import PrefixStore

from torch_powersgd import log
from torch_powersgd.option_values import cut

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# A warning names a rank that is this late. The wait then polls for its key at this interval.
PATIENCE = timedelta(seconds=8)
INTERVAL = timedelta(seconds=0.5)

T = TypeVar("T")
# Returns what the call goes on with, and the arguments that ranks compare, in JSON types.
Make = Callable[[], tuple[T, dict[str, Any]]]
# Takes the arguments of all ranks, and returns the message of the error to raise, or nothing.
Compare = Callable[[list[dict[str, Any]]], str]
# Takes the arguments of all ranks, and returns what follows from them, in JSON types.
Conclude = Callable[[list[dict[str, Any]]], Any]

_VERDICT = "verdict"
_ABSENT = "absent"  # The ranks whose keys rank 0 does not find.
_READ = "read"  # Prefix of the keys of the ranks that know of an error.


@dataclass(frozen=True)
class CollectiveCall:
    """One call that every rank of a group must make.

    Args:
        store: Store that holds the keys of this call alone.
        rank: This rank in the group.
        global_ranks: Global ranks of the group.
        deed: What a rank that has called has done, such as "called attach".
        timeout: Time after which waiting is an error.
        explain: Function of this call and the absent ranks. It is called after ``PATIENCE`` and
            then at each ``INTERVAL``. It returns why they will not call, or nothing.
        before: Store of the previous call, whose keys are no longer needed.
    """

    store: Store
    rank: int
    global_ranks: Sequence[int]
    deed: str
    timeout: timedelta
    explain: Callable[[CollectiveCall, list[int]], str] = lambda call, absent: ""
    before: Store | None = None

    def agree(
        self,
        mine: dict[str, Any],
        compare: Compare,
        conclude: Conclude | None = None,
    ) -> Any:
        """Returns what ``conclude`` returns, once all ranks have called and ``compare`` agrees.

        Args:
            mine: Arguments of this rank in JSON types, or {"error": text} if they are invalid.
            compare, conclude: As in ``agreement.agree``.
        """
        try:
            text = json.dumps(mine)
        except Exception as invalid:  # such as an integer of 5000 digits
            text = json.dumps(_as_arguments(invalid))
        self.store.set(str(self.rank), text)
        verdict = self._judge(compare, conclude) if self.rank == 0 else self._read_verdict()
        if verdict["error"]:
            self._wait_for_readers()
            raise ValueError(verdict["error"])
        return verdict["conclusion"]

    def agree_on(
        self, make: Make[T], compare: Compare, conclude: Conclude | None = None
    ) -> tuple[T, Any]:
        """Does what ``agreement.agree`` documents."""
        try:
            made, mine = make()
        except Exception as invalid:  # Of any type: the other ranks wait for it.
            self.agree(_as_arguments(invalid), compare)  # raises it on every rank
            raise
        return made, self.agree(mine, compare, conclude)

    def _judge(self, compare: Compare, conclude: Conclude | None) -> dict[str, Any]:
        """Only rank 0 compares and looks for absent ranks, so that n ranks make n requests."""
        everyone = [str(rank) for rank in range(len(self.global_ranks))]
        given = []
        error = self._wait(everyone)
        if not error:
            given = [json.loads(self.store.get(key)) for key in everyone]
            error = _error_of(given) or compare(given)
        conclusion = None if error or conclude is None else conclude(given)
        verdict = {"error": error, "conclusion": conclusion}
        self.store.set(_VERDICT, json.dumps(verdict))
        if given:
            self._forget_before(everyone)
        return verdict

    def _read_verdict(self) -> dict[str, Any]:
        error = self._wait([_VERDICT])
        verdict: dict[str, Any] = {"error": error}
        return verdict if error else json.loads(self.store.get(_VERDICT))

    def _wait_for_readers(self) -> None:
        """Keeps rank 0, whose process may host the store, until the others know of the error."""
        with contextlib.suppress(RuntimeError):  # A rank that has died does not read.
            if self.rank > 0:
                self.store.set(f"{_READ}/{self.rank}", "")
                return
            absent = {0, *self.absent()}
            keys = [f"{_READ}/{r}" for r in range(len(self.global_ranks)) if r not in absent]
            if keys:
                self.store.wait(keys, PATIENCE)
            for key in keys:
                self.store.delete_key(key)

    def absent(self) -> list[int]:
        """The ranks that have not called yet, as far as rank 0 knows."""
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
        """ "rank 1" or "ranks 1, 2", as global ranks. It names eight at most."""
        shown = ", ".join(str(self.global_ranks[rank]) for rank in ranks[:8])
        more = ", ..." if len(ranks) > 8 else ""
        return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{more}"

    def without(self, ranks: list[int]) -> str:
        """ "rank 1 has not called attach" or "ranks 1, 2 have not called attach"."""
        return f"{self.names_of(ranks)} {'has' if len(ranks) == 1 else 'have'} not {self.deed}"

    def _forget_before(self, everyone: list[str]) -> None:
        """Deletes the previous call's keys. All ranks have left it, since they are in this one."""
        if self.before is not None:
            with contextlib.suppress(RuntimeError):  # Some kinds of store cannot delete.
                for key in (*everyone, _VERDICT, _ABSENT):
                    self.before.delete_key(key)

    def _wait(self, keys: list[str]) -> str:
        """Waits for the keys. Returns why they won't come, or nothing.

        A warning names the ranks that are late.
        """
        start = time.monotonic()
        try:
            self.store.wait(keys, min(PATIENCE, self.timeout))
            return ""
        except RuntimeError:  # Not every kind of store has a type for timeouts.
            named = False
        while not self.store.check(keys):
            late = self.absent()
            if late and (reason := self.explain(self, late)):
                return reason
            if late and not named:
                named = True
                me = self.names_of([self.rank])
                log.warning(f"{self.without(late)}; {me} is waiting")
            limit = self.timeout
            if self.rank > 0 and 0 not in late:
                limit += self.timeout + PATIENCE  # Rank 0 has called since, and waits as long.
            if time.monotonic() - start > limit.total_seconds():
                seconds = self.timeout.total_seconds()
                missing = self.without(late or [0])
                return f"{missing} within {seconds:g} seconds; all ranks must do so"
            time.sleep(INTERVAL.total_seconds())
        return ""


def count_call(store: Store, rank: int) -> int:
    """Counts a call by this rank. It returns 1 for the first."""
    return store.add(f"calls/{rank}", 1)


def store_of_call(store: Store, number: int) -> PrefixStore:
    """The part of the store that belongs to one call.

    A store may outlive a group, and a later group must not find the keys of the first.
    """
    return PrefixStore(str(number), store)


def _as_arguments(error: Exception) -> dict[str, Any]:
    """Returns what a rank passes to ``agree`` instead of its arguments after an error.

    A long message, such as one that quotes a value, is cut.
    """
    kind, message = type(error).__name__, cut(str(error))
    if message and not isinstance(error, ValueError):
        message = f"{kind}: {message}"
    return {"error": message or kind}


def _error_of(everyone: list[dict[str, Any]]) -> str:
    """The message of the first rank whose arguments are invalid, or nothing."""
    errors = [given.get("error", "") for given in everyone]
    if errors[0] and len(set(errors)) == 1:
        return str(errors[0])
    return next((f"rank {rank}: {error}" for rank, error in enumerate(errors) if error), "")
