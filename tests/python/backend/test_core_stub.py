# SPDX-License-Identifier: BSD-3-Clause
"""The stub of the compiled core has the names of the core, no more and no fewer."""

from __future__ import annotations

import ast
from pathlib import Path

import torch_powersgd as tp
from torch_powersgd._core import _C

STUB = Path(tp.__file__).with_name("_C.pyi")


def _names(body: list[ast.stmt]) -> set[str]:
    functions = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    attributes = {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}
    return functions | attributes


def _own_names(owner: object) -> set[str]:
    """The names that the owner defines itself, without Python's and pybind11's."""
    return {name for name in vars(owner) if not name.startswith(("__", "_pybind11_"))}


def differences(stub: str, module: object) -> list[str]:
    """The names that the stub or the module has alone."""
    tree = ast.parse(stub)
    found = [f"only one has {name}" for name in _names(tree.body) ^ _own_names(module)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and hasattr(module, node.name):
            names, known = _names(node.body), getattr(module, node.name)
            absent = {name for name in names if not hasattr(known, name)} - {"__getattr__"}
            # A class with __getattr__ in its stub leaves the names to another test.
            hidden = set() if "__getattr__" in names else _own_names(known) - names
            found += [f"only one has {node.name}.{name}" for name in absent | hidden]
    return sorted(found)


def test_the_stub_has_the_names_of_the_core() -> None:
    assert differences(STUB.read_text(), _C) == []


def test_a_difference_is_found() -> None:
    class Module:
        class Model:
            shown = 1
            hidden = 2

        extra = 3

    stub = "gone: int\nclass Model:\n    shown: int\n    def no_more(self) -> None: ...\n"
    assert differences(stub, Module) == [
        "only one has Model.hidden",
        "only one has Model.no_more",
        "only one has extra",
        "only one has gone",
    ]
