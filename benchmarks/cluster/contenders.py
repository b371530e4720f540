# SPDX-License-Identifier: BSD-3-Clause
"""The methods that a benchmark compares, each at the requested matrix ranks.

On the command line: `plain hook-1-bucket:4 int8-wire:8,16 int8-wire+min_compression_rate=3:4`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cluster.figures import REFERENCES
from cluster.methods import find
from cluster.trainees import Method


class Contender(NamedTuple):
    """A method at a matrix rank, which is None if nothing is approximated.

    `before` is true for this project's methods with the package of another checkout.
    """

    method: str
    rank: int | None
    before: bool = False

    @property
    def name(self) -> str:
        """The name of the contender on the command line and in a record."""
        name = self.method if self.rank is None else f"{self.method}:{self.rank}"
        return name + " before" * self.before

    @property
    def title(self) -> str:
        how = self.how
        title = how.title if self.rank is None else f"{how.title}, {how.measure} {self.rank}"
        return title + ", before" * self.before

    @property
    def how(self) -> Method:
        return find(self.method)

    @property
    def learns(self) -> bool:
        """True if the method averages, so that its loss is meaningful."""
        return self.method not in REFERENCES


class Wanted(NamedTuple):
    """An argument of --methods. Without matrix ranks it uses those of --rank."""

    method: str
    ranks: Sequence[int]


def parse(text: str) -> Wanted:
    """Reads METHOD or METHOD:RANK,RANK, where a METHOD may have options."""
    method, colon, ranks = text.rpartition(":") if ":" in text else (text, "", "")
    try:
        found = find(method)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not colon:
        return Wanted(method, ())
    if not found.approximates:
        raise argparse.ArgumentTypeError(f"{method} has no matrix rank, got {text!r}")
    words = ranks.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"matrix ranks are integers of at least 1, got {text!r}")
    return Wanted(method, tuple(map(int, words)))


def expand(wanted: Iterable[Wanted], ranks: Sequence[int]) -> list[Contender]:
    """Each method at its own matrix ranks, or at `ranks` if it names none, without duplicates."""
    result: dict[Contender, None] = {}
    for method, own in wanted:
        of_method = (own or ranks) if find(method).approximates else [None]
        result.update(dict.fromkeys(Contender(method, rank) for rank in of_method))
    return list(result)


def with_before(contenders: Iterable[Contender]) -> list[Contender]:
    """The contenders, each of this project's preceded by its twin from another checkout."""
    return [
        twin
        for each in contenders
        for twin in ([each._replace(before=True), each] if each.how.options else [each])
    ]
