# SPDX-License-Identifier: BSD-3-Clause
"""Makes ``support`` importable, in the processes that tests start too, and adds ``--quick``.

Tests also import ``setup_support`` and the modules of the benchmarks.
"""

import os
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parent
_ROOT = _FOLDER.parents[1]

sys.path[:0] = [str(_FOLDER), str(_ROOT), str(_ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH")])
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run the first case of each test alone")


@pytest.hookimpl(trylast=True)  # after the selection by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    first: dict[str, pytest.Item] = {}
    others = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        if first.setdefault(test, item) is not item:
            others.append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = first.values()
