# SPDX-License-Identifier: BSD-3-Clause
"""The output of all benchmarks: JSON records with their provenance, tables, and plots.

matplotlib is imported where it is used: a machine with a GPU may not have it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from torch_powersgd.cli.tables import Table as OnTerminal

T = TypeVar("T")
Record = dict[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # headings and rows

PROVENANCE = ("date", "device", "commit", "torch")  # the first fields of a record
WIDTH = 100  # of a record, in columns


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit, from POWERSGD_COMMIT or else from git. Empty if neither knows it."""
    if named := os.environ.get("POWERSGD_COMMIT"):
        return named
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # there is no git
        return ""


def provenance(device: str = "") -> dict[str, str]:
    """The first fields of a record. The device is the processor, unless another is named."""
    return {
        "date": date.today().isoformat(),
        "device": device or processor(),
        "commit": commit(),
        "torch": torch.__version__,
    }


def run_part(
    doc: str | None, parts: Mapping[str, ModuleType], words: Sequence[str] | None
) -> tuple[ModuleType, argparse.Namespace, Record]:
    """Measures the part of a program that the command line selects, and shows its record.

    Args:
        doc: the program's docstring.
        parts: modules with add_arguments(parser), measure(arguments) and tables_of(record).
        words: the command line; None: the process's.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    named = parser.add_subparsers(dest="part", required=True)
    for name, part in parts.items():
        about = part.__doc__ or ""
        of_part = named.add_parser(name, help=about.splitlines()[0], description=about)
        part.add_arguments(of_part)
        add_files(of_part, "after every run")
    arguments = parser.parse_args(words)
    part = parts[arguments.part]
    record = recorded(arguments, part.measure)
    show(record, part.tables_of(record))
    return part, arguments, record


def add_files(parser: argparse.ArgumentParser, written: str = "at the end") -> None:
    """Adds --json, which is written when `written` says, and --show. `recorded` handles them."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, help=f"file for the results, written {written}")
    shown = "show the results in this file instead of measuring"
    parser.add_argument("--show", type=Path, metavar="JSON", help=shown)


def recorded(
    arguments: argparse.Namespace, measure: Callable[[argparse.Namespace], Record]
) -> Record:
    """The record of --show, or a new one, which is written to the --json file."""
    if arguments.show:
        shown: Record = json.loads(arguments.show.read_text())
        return shown
    record = measure(arguments)
    write(record, arguments.json)
    return record


def write(record: Record, file: Path | None) -> None:
    """Writes a record as JSON, if a file is given, with six significant digits.

    Benchmarks call it after every measurement, so that an interruption loses nothing. The file is
    replaced atomically, so it is valid JSON at any time.
    """
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    rounded = json.loads(json.dumps(record), parse_float=lambda text: float(f"{float(text):.6g}"))
    part.write_text(_text(rounded, WIDTH) + "\n")
    part.replace(file)


def _text(value: Any, room: int, key: str = "") -> str:
    """JSON with lines of at most `room` columns. A value that fits on one line is on one."""
    line = key + json.dumps(value)
    if len(line) < room or not isinstance(value, dict | list):
        return line
    if isinstance(value, dict):
        parts = [_text(each, room - 2, f"{json.dumps(name)}: ") for name, each in value.items()]
    else:
        parts = [_text(each, room - 2) for each in value]
    apart = "}" if isinstance(value, dict) else "]}"
    text = re.sub("^", "  ", _joined(parts, room - 2, apart), flags=re.MULTILINE)
    return f"{line[: len(key) + 1]}\n{text}\n{line[-1]}"


def _joined(parts: Sequence[str], room: int, apart: str) -> str:
    """The parts with commas between them. One that ends in any of `apart` gets its own line."""
    text = parts[0]
    for previous, part in zip(parts, parts[1:], strict=False):
        alone = any(each[-1] in apart or "\n" in each for each in (previous, part))
        used = len(text) - text.rfind("\n") - 1
        text += (",\n" if alone or used + len(part) + 3 > room else ", ") + part
    return text


def show(record: Record, tables: Mapping[str, Table], *about: str) -> None:
    """Prints the provenance of a record and its tables, by title."""
    print(*(f"{name} {record[name]}" for name in PROVENANCE), *about, sep=", ")
    for title, (headings, rows) in tables.items():
        print(f"\n{title}\n{OnTerminal(headings, rows)}")


def markdown(table: Table) -> str:
    """The table in Markdown, as in docs/."""
    headings, rows = table
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |\n") for line in lines)


def quartiles(values: Sequence[float]) -> list[float]:
    """The first and the third quartile. Of a single value, both are the value."""
    if len(values) < 2:
        return [*values, *values]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def in_turn(todo: Sequence[T], title: Callable[[T], str]) -> Iterator[T]:
    """Yields each item, and prints its title first."""
    for number, each in enumerate(todo, 1):
        print(f"{number} of {len(todo)}: {title(each)}", flush=True)
        yield each


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> Any:
    """A matplotlib figure and the array of its axes. No display is needed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (width, height)
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, **options)


def save(figure: Any, path: Path, dpi: int = 150) -> None:
    """Writes the figure, and closes it."""
    from matplotlib import pyplot

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
