# SPDX-License-Identifier: BSD-3-Clause
"""Calls that every rank of a group must make with the same arguments."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from torch_powersgd.group_backends import check_alive, timeout_of
from torch_powersgd.store_agreement import (
    CollectiveCall,
    Compare,
    Conclude,
    Make,
    count_call,
    global_ranks,
    store_of_call,
)

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
