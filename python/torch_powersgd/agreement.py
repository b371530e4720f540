# SPDX-License-Identifier: BSD-3-Clause
"""Calls that every rank of a group must make with the same arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from torch_powersgd.collective_call import (
    CollectiveCall,
    Compare,
    Conclude,
    Make,
    count_call,
    store_of_call,
)
from torch_powersgd.group_backends import check_alive, global_ranks, timeout_of
from torch_powersgd.option_values import shown

__all__ = ["Compare", "Make", "absent_from", "agree", "equality_of", "naming_absent"]

# Ranks on which the same collective fails notice it within this time of each other.
GRACE = timedelta(seconds=3)

T = TypeVar("T")


def agree(
    group: dist.ProcessGroup,
    call: str,
    make: Make[T],
    compare: Compare,
    conclude: Conclude | None = None,
) -> tuple[T, Any]:
    """Returns what ``make`` makes of the arguments, once all ranks have called. Collective.

    Args:
        group: Group of the ranks.
        call: Name of the function that they call, such as "attach".
        make: Checks the arguments of this rank. It may raise anything.
        compare: Compares the arguments of all ranks.
        conclude: Function of the arguments of all ranks, which rank 0 calls next.

    Returns:
        What ``make`` has made on this rank, and what ``conclude`` has returned on rank 0.

    Raises:
        ValueError: On every rank alike, if ``make`` fails on one, ``compare`` objects, or a rank
            doesn't call. On this rank only, if the group was destroyed here.
    """
    check_alive(group)
    calls = PrefixStore(f"powersgd/{call}", group.get_group_store())
    number = count_call(calls, group.rank())
    before = store_of_call(calls, number - 1) if number > 1 else None
    return CollectiveCall(
        store_of_call(calls, number),
        group.rank(),
        global_ranks(group),
        f"called {call}",
        timeout_of(group),
        before=before,
    ).agree_on(make, compare, conclude)


def equality_of(things: str) -> Compare:
    """A ``compare`` for ``agree`` that requires equal arguments; its error names ``things``."""

    def compare(everyone: list[dict[str, Any]]) -> str:
        for rank, given in enumerate(everyone):
            for name, first in everyone[0].items():
                if given.get(name) != first:
                    return (
                        f"{things} must be the same on all ranks: {name} is {shown(first)} on "
                        f"rank 0 and {shown(given.get(name))} on rank {rank}"
                    )
        return ""

    return compare


@contextlib.contextmanager
def naming_absent(group: dist.ProcessGroup, deed: str) -> Iterator[None]:
    """A context for waits: if a collective fails in it, the error names the ranks that lack it.

    Args:
        group: Group of the collective.
        deed: What ranks that don't lack it have done, as in ``absent_from``.

    Raises:
        DistBackendError: Instead of another ``RuntimeError``, if ranks lack the collective.
    """
    try:
        yield
    except dist.DistBackendError:  # The group has ended on this rank.
        raise
    except RuntimeError as error:
        if absent := absent_from(group, deed):
            raise dist.DistBackendError(f"{absent}: {error}") from error
        raise


def absent_from(group: dist.ProcessGroup, deed: str) -> str:
    """Returns which ranks have not made a call that has failed on this one, or nothing.

    The ranks on which it has failed tell each other so, for ``GRACE``. A call that succeeds costs
    nothing.

    Args:
        group: Group of the call.
        deed: What a rank that has called has done, such as "called all_reduce in step 3". It has
            the call's number.
    """
    try:
        store, rank = group.get_group_store(), group.rank()
        # A store may outlive a group, and the later one may fail in the same call.
        attached = PrefixStore("powersgd/attach", store).add(f"calls/{rank}", 0)
        call = CollectiveCall(
            PrefixStore(f"powersgd/failed/{deed}/{attached}", store),
            rank,
            global_ranks(group),
            deed,
            GRACE,
            explain=CollectiveCall.without,
        )
        call.agree({}, lambda everyone: "")
    except ValueError as absent:
        return str(absent)
    except RuntimeError:  # The process that hosts the store has ended.
        pass
    return ""
