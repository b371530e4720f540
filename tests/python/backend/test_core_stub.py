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


def test_the_stub_has_the_names_of_the_core() -> None:
    tree = ast.parse(STUB.read_text())
    assert _names(tree.body) == _own_names(_C)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names, known = _names(node.body), getattr(_C, node.name)
            assert [n for n in names - {"__getattr__"} if not hasattr(known, n)] == [], node.name
            # A class with __getattr__ in its stub leaves the names to another test.
            assert "__getattr__" in names or _own_names(known) <= names, node.name
