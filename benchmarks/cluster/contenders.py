# SPDX-License-Identifier: BSD-3-Clause
"""The methods that a benchmark compares, each at the requested matrix ranks.

On the command line: `plain hook-1-bucket:4 int8-wire:8,16 int8-wire+min_compression_rate=3:4`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NamedTuple

from cluster.figures import REFERENCES
from cluster.methods import find
from cluster.trainees import Method


class Contender(NamedTuple):
    """A method at a matrix rank, which is None if nothing is approximated."""

    method: str
    rank: int | None

    @property
    def name(self) -> str:
        """The name of the contender on the command line and in a record."""
        return self.method if self.rank is None else f"{self.method}:{self.rank}"

    @property
    def title(self) -> str:
        how = self.how
        return how.title if self.rank is None else f"{how.title}, {how.measure} {self.rank}"

    @property
    def how(self) -> Method:
        return find(self.method)

    @property
    def learns(self) -> bool:
        """True if the method averages, so that its loss is meaningful."""
        return self.method not in REFERENCES


def parse(text: str) -> list[Contender]:
    """Reads METHOD or METHOD:RANK,RANK, where a METHOD may have options."""
    method, colon, ranks = text.rpartition(":") if ":" in text else (text, "", "")
    try:
        found = find(method)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not found.approximates:
        if colon:
            raise argparse.ArgumentTypeError(f"{method} has no matrix rank, got {text!r}")
        return [Contender(method, None)]
    words = ranks.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"matrix ranks are integers of at least 1, got {text!r}")
    return [Contender(method, int(word)) for word in words]


def joined(parsed: Iterable[Iterable[Contender]]) -> list[Contender]:
    """The contenders of several arguments, without duplicates."""
    return list(dict.fromkeys(each for of_argument in parsed for each in of_argument))


def named(words: str) -> list[Contender]:
    return joined(map(parse, words.split()))
