# SPDX-License-Identifier: BSD-3-Clause
"""Runs torch_powersgd's command line as if nothing but its declared dependencies were installed:
``python bare_environment.py [plan ... | advise ...]``.

The names of the dependencies come from setup.py's own list, those of theirs from the installed
metadata. Modules of the working directory are the user's.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import re
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from setup_support.metadata import requirements


def closure(declared: list[str]) -> set[str]:
    """The distributions that these requirements install, by normalized name."""
    names: set[str] = set()
    waiting = list(declared)
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


def hidden_modules() -> set[str]:
    """The modules of all distributions that are installed here and none of the dependencies."""
    kept = {"torch-powersgd", *closure(requirements())}
    return {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if not kept & {_normalized(owner) for owner in owners}
    }


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Hiding(importlib.abc.MetaPathFinder):
    """A finder that does not find some of the modules that another one finds."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self._finder = finder
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if path is None and fullname.partition(".")[0] in self._hidden:
            return None
        return self._finder.find_spec(fullname, path, target)


if __name__ == "__main__":
    hidden = hidden_modules()
    sys.meta_path[:] = [Hiding(finder, hidden) for finder in sys.meta_path]
    for module in set(sys.modules) & {"numpy", "rich"}:
        raise SystemExit(f"{module} is imported before it is hidden")
    runpy.run_module("torch_powersgd", run_name="__main__", alter_sys=True)
