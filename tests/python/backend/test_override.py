# SPDX-License-Identifier: BSD-3-Clause
"""The override of the scope: nested, in backward, around backward, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch

import torch_powersgd as tp
from support import ranks
from support.call_observer import (
    MIN_NUMEL,
    SCOPES,
    SETTLE_PASSES,
    Run,
    attached,
    flat,
    in_backward,
    observe,
    observe_ddp,
    options_of,
    outside,
    unattached,
)

Make = Callable[..., torch.Tensor]


def _override(rank: int) -> dict[str, int]:
    """The compressed calls of one flat tensor, under overrides of several kinds."""
    found: dict[str, int] = {}

    def count(name: str, where: Run = outside, make: Make = flat, *args: int) -> None:
        calls, exact = observe(where, partial(make, *(args or [rank])))
        assert exact == (calls == 0), name
        found[name] = calls

    count("before")
    with tp.scope("always"):
        count("on")
        count("on, in backward", in_backward)
        count("on, small", outside, flat, rank, MIN_NUMEL // 2)
        count("on, too small to pay", outside, flat, rank, 9)
        count("on, integers", outside, torch.arange, 20_000)
        with tp.scope("never"):
            count("on, off")
            with tp.scope("always"):
                count("on, off, on")
            count("on, off again")
        count("on again")
        on_thread = threading.Thread(target=count, args=("on in another thread",))
        on_thread.start()
        on_thread.join()
    count("after")
    with tp.scope("never"):
        count("off, in backward", in_backward)

    def enable_inside() -> None:
        with tp.scope("always"):
            count("on inside backward")

    def disable_inside() -> None:
        with tp.scope("never"):
            count("off inside backward")
        count("after off inside backward")

    for _ in range(SETTLE_PASSES + 1):
        in_backward(enable_inside)
    for _ in range(SETTLE_PASSES + 1):
        in_backward(disable_inside)
    with pytest.raises(KeyError), tp.scope("always"):
        raise KeyError
    count("after an exception")
    return found


@pytest.mark.parametrize("scope", SCOPES)
def test_override(scope: str) -> None:
    default, in_a_backward = int(scope == "always"), int(scope in ("always", "backward"))
    expected = {
        "before": default,
        "on": 1,
        "on, in backward": 1,
        "on, small": 1,
        "on, too small to pay": 0,
        "on, integers": 0,
        "on, off": 0,
        "on, off, on": 1,
        "on, off again": 0,
        "on again": 1,
        "on in another thread": default,
        "after": default,
        "off, in backward": 0,
        "on inside backward": 1,
        "off inside backward": 0,
        "after off inside backward": in_a_backward,
        "after an exception": default,
    }
    for found in ranks.run(2, _override, options=options_of(scope)):
        assert found == expected


@pytest.mark.parametrize("block", ["always", "never"])
@pytest.mark.parametrize("make", [attached, unattached])
@pytest.mark.parametrize("scope", ["backward", "never"])
def test_override_around_backward_of_ddp(
    scope: str, make: Callable[[], torch.nn.Module], block: str
) -> None:
    expected = (1, False) if block == "always" else (0, True)
    arguments = (observe_ddp, make, block)
    assert ranks.run(2, *arguments, options=options_of(scope)) == [expected] * 2
