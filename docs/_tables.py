# SPDX-License-Identifier: BSD-3-Clause
"""Prints docs/PAGE.md with new tables from benchmarks/results. --write writes all such pages.

A table stands between two comments, <!-- table: NAME of FILE --> and <!-- end of table -->. NAME
is one of TABLES. It can take arguments:
<!-- table: losses front language lstm of convergence.json -->. The word -METHOD leaves a row out.

    python docs/_tables.py performance
    python docs/_tables.py --write
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from cluster import tables as of_cluster  # noqa: E402
from convergence import tables as of_convergence  # noqa: E402
from reliability.faults import outcomes  # noqa: E402
from report import Record, Table, markdown  # noqa: E402
from scaling import tables as of_scaling  # noqa: E402
from stages import tables as of_stages  # noqa: E402

PAGES = ("performance", "convergence", "local-steps", "scaling", "reliability")
_TABLE = re.compile(
    r"(<!-- table: (\w+)((?: \S+)*?) of (\S+) -->\n).*?(<!-- end of table -->)", flags=re.DOTALL
)
_BACKENDS = {
    "cpu:powersgd": "`cpu:powersgd`",
    "attached": "`cpu:powersgd`, attached",
}


def suites(record: Record) -> Table:
    """How many of other people's tests have the same result as with Gloo."""
    headings = ["suite", "backend", "ranks", "tests", "passed as with Gloo", "skipped as with Gloo"]
    headings += ["fail over Gloo", "differences"]
    rows = [
        [row["suite"], _BACKENDS[row["backend"]]]
        + [str(row[field]) for field in ("ranks", "tests", "passed", "skipped", "fail over gloo")]
        + [str(len(row["differences"]))]
        for row in record["rows"]
    ]
    return headings, rows


_OF_RECORDS: tuple[Callable[..., Table], ...] = (
    of_cluster.links,
    of_cluster.by_model,
    of_stages.stages_by_rank,
    of_stages.stages_on_gpu,
    of_convergence.losses,
    of_convergence.losses_by_task,
    of_convergence.shadow,
    of_convergence.unlike_data,
    outcomes,
    suites,
    of_scaling.larger_groups,
    of_scaling.sent_by_ranks,
    of_scaling.several_devices,
)
TABLES = {table.__name__: table for table in _OF_RECORDS}


def main() -> None:
    if sys.argv[1:] != ["--write"]:
        (page,) = sys.argv[1:]
        sys.stdout.write(_remade(_path(page)))
        return
    for page in PAGES:
        _path(page).write_text(_remade(_path(page)))


def _path(page: str) -> Path:
    return Path(__file__).with_name(f"{page}.md")


def _remade(page: Path) -> str:
    return _TABLE.sub(_made, page.read_text())


def _made(found: re.Match[str]) -> str:
    record = json.loads((BENCHMARKS / "results" / found[4]).read_text())
    words = found[3].split()
    arguments = [word for word in words if not word.startswith("-")]
    left_out = [word[1:] for word in words if word.startswith("-")]
    options = {"without": left_out} if left_out else {}
    table = TABLES[found[2]](record, *arguments, **options)
    return f"{found[1]}\n{markdown(table)}\n{found[5]}"


if __name__ == "__main__":
    main()
