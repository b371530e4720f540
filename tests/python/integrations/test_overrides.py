# SPDX-License-Identifier: BSD-3-Clause
"""What the integrations need of the libraries that they extend."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from support.integrations import needs
from support.on_ranks import on_ranks
from torch_powersgd.integrations import libraries
from torch_powersgd.integrations.libraries import overrides


@pytest.mark.parametrize(
    ("library", "package"),
    [
        ("lightning", "lightning"),
        ("ray", "'ray[train]'"),
        ("torchtitan", "torchtitan"),
        ("transformers", "transformers"),
    ],
)
@on_ranks(1, backend=None)
def test_a_missing_library_is_named(rank: int, library: str, package: str) -> None:
    modules: dict[str, Any] = sys.modules
    modules[library] = None  # so that it cannot be imported
    with pytest.raises(ModuleNotFoundError) as raised:
        import_module(f"torch_powersgd.integrations.{library}")
    assert str(raised.value).startswith(f"torch_powersgd.integrations.{library} needs")
    assert f"pip install {package}" in str(raised.value)


@on_ranks(1, backend=None)
def test_the_package_imports_none_of_the_libraries(rank: int) -> None:
    import_module("torch_powersgd.integrations.accelerate")
    assert not {"accelerate", "lightning", "ray", "torchtitan", "transformers"} & {*sys.modules}


class _Base:
    def called(self) -> None: ...
    def _also_called(self) -> None: ...


@needs("lightning")
def test_a_library_without_an_overridden_method_is_an_error() -> None:
    @overrides("lightning", "_also_called")
    class Fits(_Base):
        def called(self) -> None: ...
        def _also_called(self) -> None: ...
        def _own(self) -> None: ...

    class Misfit(Fits):
        def configure(self) -> None: ...

    with pytest.raises(ImportError, match=r"fit lightning .*: Fits has no configure\. .*=="):
        overrides("lightning")(Misfit)
    with pytest.raises(ImportError, match="Fits has no _create"):
        overrides("lightning", "_create")(type("Misfit", (Fits,), {}))


def test_all_classes_that_extend_a_library_are_checked() -> None:
    """The integration of torchft has checks of its own."""
    found = 0
    for file in Path(libraries.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.bases:
                assert any(
                    f"overrides('{file.stem}'" in ast.unparse(d) for d in node.decorator_list
                )
                found += 1
    assert found == 5
