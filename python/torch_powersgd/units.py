# SPDX-License-Identifier: BSD-3-Clause
"""Formats quantities for messages and tables."""


def size_text(size: float) -> str:
    """The number of bytes with three digits and a decimal unit, such as "8.40 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{_three_digits(size / factor)} {unit}"
    return f"{size} B"


def ms_text(seconds: float) -> str:
    """The milliseconds with three digits, at most two of them decimals."""
    return _three_digits(1e3 * seconds)


def times_text(ratio: float) -> str:
    """A ratio with three digits, such as "375 x"."""
    return f"{_three_digits(ratio)} x"


def processes_text(count: int) -> str:
    """The number of processes, such as "1 process"."""
    return f"{count} process{'es' * (count != 1)}"


def _three_digits(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
