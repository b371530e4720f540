# SPDX-License-Identifier: BSD-3-Clause
"""Keeps how other people's suites have ended, for docs/reliability.md.

POWERSGD_SUITES_RECORD names the file, which the tests of a whole suite then write:

    POWERSGD_SUITES_RECORD=benchmarks/results/other_suites.json \\
      python -m pytest tests/python/other_suites -m long
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def add(suite: str, backend: str, ranks: int, ended: dict[str, Any]) -> None:
    """Adds a row, or replaces it. It does nothing without a file."""
    if not (named := os.environ.get("POWERSGD_SUITES_RECORD")):
        return
    import report  # of the benchmarks, which are not everywhere where the tests run

    file = Path(named)
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    key = {"suite": suite, "backend": backend, "ranks": ranks}
    rows = [row for row in rows if any(row[field] != key[field] for field in key)]
    rows.append({**key, **ended})
    rows.sort(key=lambda row: (row["suite"] != "torch", row["suite"], row["backend"], row["ranks"]))
    report.write({**report.provenance(report.processor()), "rows": rows}, file)
