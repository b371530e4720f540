# SPDX-License-Identifier: BSD-3-Clause
"""Prints docs/api.md with new tables from signatures and docstrings. --write writes it.

Comments in the page hold mkdocstrings directives. After each comes a table of what they name, for
readers of a clone. On the site, this file is a MkDocs hook that replaces the table with the
directives.

The sources are parsed, not imported: integrations need libraries that may not be installed.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("api.md")
SOURCES = Path(__file__).parents[1] / "python"
_SECTION = re.compile(r"(<!--\n(:::.*?)-->\n\n)(?:\|[^\n]*\n)*", flags=re.DOTALL)
_DIRECTIVE = re.compile(r"::: (\S+)\n((?: +.*\n)*)")
_ATTRIBUTE = re.compile(r"^ {4}(\w+): ((?:.|\n {5,})*)", flags=re.MULTILINE)


def main() -> None:
    page = _SECTION.sub(lambda found: f"{found[1]}{_table(found[2])}", PAGE.read_text())
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page)
    else:
        sys.stdout.write(page)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The MkDocs hook."""
    return _SECTION.sub(r"\2", markdown)


def _table(directives: str) -> str:
    rows = ["| name | summary | source |", "|---|---|---|"]
    for path, options in _DIRECTIVE.findall(directives):
        file, node = _definition(path)
        heading = re.search(r"heading: ([\w.]+)", options)
        name = (heading[1] if heading else path).removeprefix("torch_powersgd.")
        source = f"[{file.name}](../{file.relative_to(SOURCES.parent)})"
        rows.append(_row(name + _call_of(node), _docstring(node), source))
        if isinstance(node, ast.ClassDef):
            members = re.search(r"members: (?:false|\[(.*)\])", options)
            shown = re.findall(r"\w+", members[1] or "") if members else None
            rows += [_row(f".{member}", text) for member, text in _members(node, shown)]
    return "\n".join(rows) + "\n"


def _definition(path: str) -> tuple[Path, ast.ClassDef | ast.FunctionDef]:
    """The file that defines a name, even if other modules import it, and the definition."""
    module, _, name = path.rpartition(".")
    file = SOURCES / module.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    tree = ast.parse(file.read_text())
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return file, node
    for each in ast.walk(tree):  # Some imports are only for type checkers.
        if isinstance(each, ast.ImportFrom) and name in (alias.name for alias in each.names):
            return _definition(f"{each.module}.{name}")
    raise ValueError(f"{file} has no {name}")


def _members(node: ast.ClassDef, shown: list[str] | None) -> Iterator[tuple[str, str]]:
    """The public attributes and methods of a class, with their summaries."""
    attributes = _docstring(node).partition("Attributes:\n")[2]
    for name, text in _ATTRIBUTE.findall(attributes):
        yield name, re.split(r"(?<=\.)\s", text)[0]
    for each in _functions(node):
        kinds = {ast.unparse(decorator) for decorator in each.decorator_list}
        hidden = each.name.startswith("_") or f"{each.name}.setter" in kinds
        if not hidden and (shown is None or each.name in shown):
            call = "" if "property" in kinds else _parameters(each, bound=True)
            yield each.name + call, _docstring(each)


def _call_of(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The signature of a function or class. Empty for a class that users don't call."""
    if isinstance(node, ast.FunctionDef):
        return _parameters(node)
    if "Args:\n" not in _docstring(node):
        return ""
    made = [each for each in _functions(node) if each.name == "__init__"]
    return _parameters(made[0], bound=True) if made else "(...)"


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _parameters(node: ast.FunctionDef, bound: bool = False) -> str:
    """The parameters without their types, in parentheses."""
    for each in ast.walk(node.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    if bound:
        del node.args.args[0]
    return f"({ast.unparse(node.args)})"


def _docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    return ast.get_docstring(node) or ""


def _row(name: str, text: str, source: str = "") -> str:
    summary = " ".join(text.partition("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    return f"| `{name}` | {summary} | {source} |"


if __name__ == "__main__":
    main()
