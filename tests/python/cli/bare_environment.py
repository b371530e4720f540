# SPDX-License-Identifier: BSD-3-Clause
"""Runs torch_powersgd's command line as if nothing but its declared dependencies were installed:
``python bare_environment.py [plan ... | advise ...]``.

The names of the dependencies come from setup.py's own list, those of theirs from the installed
metadata. Modules of the working directory are the user's.
"""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from setup_support.metadata import requirements


def dependencies() -> set[str]:
    """The distributions that the package needs, by normalized name."""
    names: set[str] = set()
    waiting = requirements()
    while waiting:
        requirement = waiting.pop()
        name = _normalized(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        if name in names or "extra ==" in requirement:
            continue
        names.add(name)
        try:
            waiting += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # it is for another platform
    return names


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    kept = {"torch-powersgd", *dependencies()}
    modules: dict[str, Any] = sys.modules
    for module, owners in importlib.metadata.packages_distributions().items():
        if not kept & {_normalized(owner) for owner in owners}:
            if module in modules:
                raise SystemExit(f"{module} is imported before it is hidden")
            modules[module] = None
    runpy.run_module("torch_powersgd", run_name="__main__", alter_sys=True)
