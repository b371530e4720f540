# SPDX-License-Identifier: BSD-3-Clause
"""Runs torch_powersgd's command line as if nothing but its declared dependencies were installed:
``python bare_environment.py [plan ... | advise ...]``.

The names of the dependencies come from setup.py's own list, those of theirs from the installed
metadata.
Modules of the working directory are allowed: they are the user's.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import re
import runpy
import sys
from pathlib import Path

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


def allowed_modules() -> set[str]:
    """The names of the modules that may be imported."""
    distributions = closure(requirements())
    found = {
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if distributions & {_normalized(owner) for owner in owners}
    }
    local = {path.stem for path in Path.cwd().glob("*.py")}
    return found | local | {"torch_powersgd"} | set(sys.stdlib_module_names)


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


class Refusal(importlib.abc.MetaPathFinder):
    """A finder that raises for each module that is not allowed, and finds no other."""

    def __init__(self, allowed: set[str]) -> None:
        self._allowed = allowed

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if path is None and fullname.partition(".")[0] not in self._allowed:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


if __name__ == "__main__":
    sys.meta_path.insert(0, Refusal(allowed_modules()))
    for module in set(sys.modules) & {"numpy", "rich"}:
        raise SystemExit(f"{module} is imported before the refusal")
    runpy.run_module("torch_powersgd", run_name="__main__", alter_sys=True)
