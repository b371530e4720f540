# SPDX-License-Identifier: BSD-3-Clause
"""``powersgd plan``: how far each parameter of a model is compressed."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_powersgd._core import _C
from torch_powersgd.cli.arguments import (
    RECOMMENDED_WIRE,
    WIRES,
    add_model,
    add_rate,
    count,
    fraction,
    make_model,
)
from torch_powersgd.cli.footprint import Footprint, assign_buckets, footprint_of_bucket, ring_bytes
from torch_powersgd.cli.tables import GAP, Table, say, terminal_width
from torch_powersgd.cli.verdict import RECOMMENDED
from torch_powersgd.local_steps.schedule import lay_under
from torch_powersgd.matrices import as_reals, compressible
from torch_powersgd.option_values import dtype_name, parse
from torch_powersgd.options import Options, check_matrix_ranks, rank_text, to_core
from torch_powersgd.sparse import check_density, round_bytes
from torch_powersgd.stats import ratio
from torch_powersgd.units import size_text

Hosts = tuple[int, int]  # the number of hosts, and of processes on each
ONE_EACH: Hosts = (2, 1)
SHORTEST_NAME = 12  # columns of the terminal
PLAN = """\
Shows which parameters of a model PowerSGD compresses, and how many bytes a step then sends.
It needs no process group and no GPU.
"""


def add(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="show which parameters are compressed, and the bytes of a step",
        description=PLAN,
    )
    plan.add_argument(
        "--rank", type=int, default=RECOMMENDED.matrix_approximation_rank,
        help="matrix rank of the factors (%(default)s)",
    )  # fmt: skip
    plan.add_argument(
        "--matrix-ranks", metavar="NAME=RANK,...",
        help="matrix ranks of single parameters, by names or patterns such as '*.mlp.*'",
    )  # fmt: skip
    plan.add_argument(
        "--wire-dtype", choices=WIRES, default=RECOMMENDED_WIRE, metavar="DTYPE",
        help=f"wire dtype of the factors: {', '.join(WIRES)} (%(default)s); none sends float32",
    )  # fmt: skip
    plan.add_argument(
        "--hosts", type=count, default=2, metavar="N", help="hosts that train (%(default)s)"
    )
    plan.add_argument(
        "--per-host", type=count, default=1, metavar="N", help="processes per host (%(default)s)"
    )
    plan.add_argument(
        "--density", type=fraction, help="also show what local steps send with this density"
    )
    shown = plan.add_mutually_exclusive_group()
    shown.add_argument(
        "--top", type=count, default=10, metavar="N", help="rows of the table to show (%(default)s)"
    )
    shown.add_argument("--all", action="store_true", help="show one row per parameter")
    add_model(plan)
    add_rate(plan)
    plan.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    own = arguments.matrix_ranks
    options = Options(
        matrix_approximation_rank=arguments.rank,
        min_compression_rate=arguments.min_compression_rate,
        wire_dtype=WIRES[arguments.wire_dtype],
        matrix_ranks=parse("--matrix-ranks", "Mapping", own) if own else (),
    )
    if (density := arguments.density) is not None:
        check_density(density)
    top, hosts = None if arguments.all else arguments.top, (arguments.hosts, arguments.per_host)
    model = make_model(arguments.model)
    print_plan(model, options, top, hosts)
    if density is not None:
        trained = [as_reals(p) for p in model.parameters() if p.requires_grad]
        factors = footprint_of_model(model, Options(**lay_under(None, 0, Options())), ONE_EACH)
        sent = round_bytes(trained, density)
        print()
        say(
            f"An average of local steps sends {size_text(sent)} to each other process with "
            f"density={density:g}, and {size_text(factors.sent_bytes)} with factors, their default."
        )
    return 0


@dataclass(frozen=True)
class Row:
    """A parameter, or several whose names differ only in numbers.

    Attributes:
        name: the name, with a star for each number that differs.
        count: the number of parameters.
        shape: the shape of each.
        rank: the matrix rank of the factors. It is 0 if the parameter is sent whole.
        gradient_bytes: the bytes of the gradients.
        sent_bytes: the bytes that are sent for them.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    rank: int
    gradient_bytes: int
    sent_bytes: int


def rows_of(model: torch.nn.Module, options: Options) -> list[Row]:
    """A row for each parameter that requires a gradient, in the order of the model."""
    core = to_core(options)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    reals = [as_reals(p) for _, p in named]
    own = [_C.rank_of(name, core) for name, _ in named]
    ranks = [
        _C.matrix_rank(list(p.shape), core, p.dtype, rank)
        for p, rank in zip(reals, own, strict=True)
    ]
    rows: dict[int, Row] = {}
    for bucket in assign_buckets(reals):
        compressed = any(ranks[i] for i in bucket)
        for i in bucket:
            p = reals[i]
            # A bucket without a compressed matrix is sent whole, in its own dtype.
            size = p.numel() * p.dtype.itemsize
            sent = size
            if compressed:
                sent = _C.content_bytes([list(p.shape)], core, p.dtype, [own[i]])
            name, parameter = named[i]
            rows[i] = Row(name, 1, tuple(parameter.shape), ranks[i], size, sent)
    return [rows[i] for i in range(len(named))]


def grouped(rows: Iterable[Row]) -> list[Row]:
    """One row for the parameters of the same shape whose names differ only in numbers."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((_pattern(row.name), row.shape, row.rank), []).append(row)
    return [
        Row(
            _name_of_all([row.name for row in members]),
            len(members),
            members[0].shape,
            members[0].rank,
            sum(row.gradient_bytes for row in members),
            sum(row.sent_bytes for row in members),
        )
        for members in groups.values()
    ]


def footprint_of_model(model: torch.nn.Module, options: Options, hosts: Hosts) -> Footprint:
    """The costs of a step, with the buckets that DDP makes of the model."""
    trained = {name: as_reals(p) for name, p in model.named_parameters() if p.requires_grad}
    names, parameters = [*trained], [*trained.values()]
    total = Footprint()
    for bucket in assign_buckets(parameters):
        shapes = [list(parameters[i].shape) for i in bucket]
        ranks = [_C.rank_of(names[i], to_core(options)) for i in bucket]
        dtype = parameters[bucket[0]].dtype
        total += footprint_of_bucket(shapes, options, dtype, math.prod(hosts), hosts[1], ranks)
    return total


def common_prefix(names: Sequence[str]) -> str:
    """The leading parts, each with its dot, that all names share."""
    parts = [name.split(".")[:-1] for name in names]
    alike = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return "".join(f"{level[0]}." for level in alike)


def wrapped(name: str, width: int) -> str:
    """The name in lines of at most ``width`` columns, broken before its dots where possible."""
    lines = [""]
    for part in re.findall(r"^[^.]*|\.[^.]*", name):
        if len(lines[-1] + part) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
        while len(lines[-1]) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(lines)


def print_plan(
    model: torch.nn.Module, options: Options, top: int | None, hosts: Hosts = ONE_EACH
) -> None:
    """Prints the largest parameters, how each is sent, and the totals.

    Args:
        model: the model.
        options: the options under which it trains.
        top: the number of rows, each of which may stand for several layers. None: a row for each
            parameter.
        hosts: the number of hosts, and of processes on each.

    Raises:
        ValueError: if no parameter of the model requires a gradient.
    """
    rows = rows_of(model, options)
    if not rows:
        raise ValueError("the model has no parameter that requires a gradient")
    check_matrix_ranks(options, [row.name for row in rows])
    footprint = footprint_of_model(model, options, hosts)
    for sentence in summary(model, len(rows), footprint, options, hosts):
        say(sentence)
    if not footprint.compressed:
        return
    shown, others = rows, []
    if top is not None:
        by_size = sorted(grouped(rows), key=lambda row: row.gradient_bytes, reverse=True)
        shown, others = by_size[:top], by_size[top:]
    prefix = common_prefix([row.name for row in rows]) if len(rows) > 1 else ""
    if prefix:
        say(f"All names begin with {prefix}, which the table leaves out.")
    print()
    _table(shown, others, footprint, len(prefix)).print()


def summary(
    model: torch.nn.Module,
    parameters: int,
    footprint: Footprint,
    options: Options,
    hosts: Hosts = ONE_EACH,
) -> list[str]:
    """The totals, in sentences."""
    wire = dtype_name(options.wire_dtype or torch.float32)
    setting = f"matrix rank {rank_text(options)} with factors in {wire}"
    frozen = sum(1 for p in model.parameters() if not p.requires_grad)
    trained = [p for p in model.parameters() if p.requires_grad]
    highest, *exact = compressible(trained, options)
    ignored = [f"Parameters without a gradient, which are left out: {frozen}."] if frozen else []
    if not footprint.compressed:
        return [
            f"Nothing is compressed at {setting}: each step sends "
            f"{size_text(footprint.gradient_bytes)} per process, as without compression. A "
            "weight of n x m is compressed only if "
            "(n + m) * matrix rank * min_compression_rate < n * m.",
            highest,
            *ignored,
            *exact,
        ]
    elements = sum(as_reals(p).numel() for p in trained)
    share = 100 * footprint.compressed_elements / elements
    kernels = footprint.table_bytes + footprint.workspace_bytes
    return [
        f"{footprint.compressed} of {parameters} parameters ({share:.1f} % of {elements:,} "
        f"elements) are compressed at {setting}.",
        _sent(footprint, hosts),
        f"Each process needs {size_text(footprint.memory_bytes)} more memory than without "
        "compression: "
        f"{size_text(footprint.residual_bytes)} for the residual, "
        f"{size_text(footprint.factor_bytes)} for factors and their buffers, "
        f"{size_text(kernels)} for the kernels' tables and workspaces.",
        *ignored,
        *exact,
    ]


def _sent(footprint: Footprint, hosts: Hosts) -> str:
    """What a process sends, or a host whose processes share a link to others."""
    whole, part = footprint.gradient_bytes, footprint.sent_bytes
    by, place = "Each step sends", " per process"
    if hosts[0] > 1 and math.prod(hosts) > 2:
        whole, part = ring_bytes(whole, math.prod(hosts)), footprint.host_bytes
    if hosts[0] > 1 and hosts[1] > 1:
        by, place = f"In a step, each of {hosts[0]} hosts of {hosts[1]} processes sends", ""
    sizes = f"{size_text(part)}{place} instead of {size_text(whole)}"
    return f"{by} {sizes}: {whole / part:.1f} times less."


def _table(shown: list[Row], others: list[Row], footprint: Footprint, prefix: int) -> Table:
    rows = [_cells(row, prefix) for row in shown]
    if others:
        count = sum(row.count for row in others)
        raw = sum(row.count for row in others if not row.rank)
        rank = "raw" if raw == count else f"{raw} raw"
        rows.append((f"{count} others", "", rank, *_numbers(others)))
    totals = (footprint.gradient_bytes, footprint.sent_bytes)
    last = ("all", "", "", *map(size_text, totals), f"{totals[0] / totals[1]:.1f}")
    headings = ("parameter", "shape", "matrix rank", "gradient", "payload", "ratio")
    columns = list(zip(headings, *rows, last, strict=True))
    taken = sum(max(map(len, column)) + GAP for column in columns[1:])
    for_name = max(terminal_width() - taken, SHORTEST_NAME)
    return Table(headings, [(wrapped(name, for_name), *rest) for name, *rest in rows], last)


def _cells(row: Row, prefix: int) -> tuple[str, ...]:
    name = row.name[prefix:] + (f" ({row.count})" if row.count > 1 else "")
    shape = " x ".join(map(str, row.shape)) or "scalar"
    return (name, shape, str(row.rank or "raw"), *_numbers([row]))


def _numbers(rows: list[Row]) -> tuple[str, str, str]:
    gradient = sum(row.gradient_bytes for row in rows)
    sent = sum(row.sent_bytes for row in rows)
    return size_text(gradient), size_text(sent), f"{ratio(gradient, sent):.1f}"


def _pattern(name: str) -> str:
    """The name with a star for each part that is a number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _name_of_all(names: list[str]) -> str:
    """A common name for names of one pattern, with a star for each number that differs."""
    parts = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(level[0] if len(set(level)) == 1 else "*" for level in parts)
