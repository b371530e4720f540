# SPDX-License-Identifier: BSD-3-Clause
"""docs/troubleshooting.md explains every message of the sources, and pages quote no others.

A message is an error or a log line, in which each variable part is an ellipsis.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from markdown_blocks import PAGES

from support.repository import ROOT

_GAP = "…"
_LOGGING = {"debug", "info", "notice", "warning", "error", "warn", "log"}
# A text of fewer characters between two gaps says too little to be looked for.
_SHORTEST = 4
# A text with so many spaces is a sentence, wherever it stands.
_FEWEST_SPACES = 2

_CPP_CALL = re.compile(
    r"\b(?:TORCH_CHECK(?:_VALUE|_NOT_IMPLEMENTED)?|TORCH_WARN(?:_ONCE)?|c10::str|check|reject)\s*\("
)
_CPP_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
_CPP_FORMAT = re.compile(r"%[-+ 0#]*[\d.*]*(?:ll|l|z)?[a-zA-Z]")


@dataclass(frozen=True)
class Message:
    """A text that a user may see."""

    place: str
    text: str

    @property
    def parts(self) -> list[str]:
        """The fixed parts, in their order."""
        return _parts_of(self.text)


def _parts_of(text: str) -> list[str]:
    """The fixed parts of a text, in their order, without those that say too little."""
    parts = [" ".join(part.split()) for part in text.split(_GAP)]
    return [part for part in parts if len(part) >= _SHORTEST]


@functools.cache
def _all_messages() -> list[Message]:
    """The messages of the package and of its core. Kernels and bindings have no messages."""
    found = []
    for path in sorted((ROOT / "python").rglob("*.py")):
        found += _python_messages(path.read_text(), str(path.relative_to(ROOT)))
    for folder in ("csrc", "include"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".h", ".cpp"} and not {"kernels", "bindings"} & {*path.parts}:
                found += _cpp_messages(path.read_text(), str(path.relative_to(ROOT)))
    return [message for message in found if message.parts]


def _python_messages(source: str, place: str) -> list[Message]:
    """The texts of all raised errors and log lines, and the sentences that are kept or returned."""
    found = []
    for node in ast.walk(ast.parse(source)):
        fewest = 1
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = node.exc.args
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _LOGGING:
            texts = node.args
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Return)) and node.value is not None:
            texts, fewest = [node.value], _FEWEST_SPACES
        else:
            continue
        for text in map(_text_of, texts):
            if text.strip(f" {_GAP}").count(" ") >= fewest:
                found.append(Message(f"{place}:{node.lineno}", text))
    return found


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else _GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(value) for value in node.values)
    if isinstance(node, ast.IfExp):
        return _text_of(node.body)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text_of(node.left) + _text_of(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return _CPP_FORMAT.sub(_GAP, _text_of(node.left))
    return _GAP


def _cpp_messages(source: str, place: str) -> list[Message]:
    """The texts of all checks, log lines, and other statements with a literal of four words."""
    source = re.sub(r"^[ \t]*(//|#include).*$", "", source, flags=re.MULTILINE)
    found, read = [], 0
    for literal in _CPP_LITERAL.finditer(source):
        if literal.start() < read:
            continue
        call = _enclosing_call(source, literal.start())
        if call is None and literal[1].count(" ") < _FEWEST_SPACES:
            continue
        start, end = call or _statement(source, literal.start())
        text = _literals(source[start:end])
        read = max(end, literal.end())
        if " " in text.strip(f" {_GAP}"):
            found.append(Message(f"{place}:{source.count(chr(10), 0, literal.start()) + 1}", text))
    return found


def _enclosing_call(source: str, position: int) -> tuple[int, int] | None:
    """The arguments of the outermost call in this statement that makes a message."""
    start, end = _statement(source, position)
    for call in _CPP_CALL.finditer(source, start, position):
        arguments = call.end(), call.end() + len(_arguments(source, call.end()))
        if arguments[0] <= position < arguments[1]:
            return arguments
    return None


def _statement(source: str, position: int) -> tuple[int, int]:
    """Where the statement around a literal begins and ends."""
    start = max(source.rfind(mark, 0, position) for mark in ";{}") + 1
    while True:
        literal = _CPP_LITERAL.match(source, position)
        if literal:
            position = literal.end()
        elif position == len(source) or source[position] == ";":
            return start, position
        else:
            position += 1


def _arguments(source: str, start: int) -> str:
    """The text from an opening parenthesis to the one that closes it."""
    depth, position = 1, start
    while depth and position < len(source):
        literal = _CPP_LITERAL.match(source, position)
        if literal:
            position = literal.end()
            continue
        depth += {"(": 1, ")": -1}.get(source[position], 0)
        position += 1
    return source[start : position - 1]


def _literals(arguments: str) -> str:
    """All literals in turn; a value between two of them is a gap."""
    pieces, end = [], 0
    for literal in _CPP_LITERAL.finditer(arguments):
        between = arguments[end : literal.start()]
        pieces += [_GAP if between.strip(" ,\n") else "", literal[1].replace('\\"', '"')]
        end = literal.end()
    pieces.append(_GAP if arguments[end:].strip() else "")
    return _CPP_FORMAT.sub(_GAP, "".join(pieces))


def _quotations(page: str) -> Iterator[str]:
    """The messages that a page of Markdown quotes: code in the first column of its tables."""
    for found in re.finditer(r"^\| (`+)(.+?)\1 \|", page, re.MULTILINE):
        yield found[2].replace("\\|", "|").strip()


def _is_from(quoted: str, message: Message) -> bool:
    """True if the message has all fixed parts of a quotation, in their order."""
    position, whole = 0, " ".join(message.text.split())
    for part in _parts_of(quoted):
        position = whole.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return bool(_parts_of(quoted))


def _has_longest_part(line: str, message: Message) -> bool:
    """True if a line has the longest fixed part of a message. Others may be optional."""
    return max(message.parts, key=len) in line


QUOTED = list(_quotations((ROOT / "docs" / "troubleshooting.md").read_text()))
# Messages of torch and of the tools around it, which the page explains as well.
OF_OTHERS = (
    "Unknown c10d backend type",
    "Timed out waiting",
    "No backend of type",
    "No matching distribution found",
    "/usr/bin/ld",
)
# All checks of options in the core have one form, which has one row. Commands explain their errors
# themselves. The rest becomes part of other messages, or asserts what no user can break.
NOT_EXPLAINED = (
    "csrc/plan/options.cpp",
    "include/powersgd/option_table.h",
    "csrc/gradients/flat_tensors.cpp",
    "csrc/engine/work.cpp",
    "python/torch_powersgd/summary.py",
    "python/torch_powersgd/local_steps/summary.py",
    "python/torch_powersgd/__main__.py",
    "python/torch_powersgd/commands/",
    "python/torch_powersgd/tools/",
)


def test_every_message_is_explained() -> None:
    missing = [
        f"{message.place}: {message.text}"
        for message in _all_messages()
        if not message.place.startswith(NOT_EXPLAINED)
        and not any(_is_from(q, message) and _has_longest_part(q, message) for q in QUOTED)
    ]
    assert missing == []


def test_explained_messages_exist() -> None:
    assert len(QUOTED) > 50
    own = [text for text in QUOTED if not text.startswith(OF_OTHERS)]
    assert [text for text in own if not any(_is_from(text, m) for m in _all_messages())] == []


def test_log_lines_on_pages_exist() -> None:
    shown = re.compile(r"^(?:torch_powersgd: |[A-Z]+:torch_powersgd:)(.*)", flags=re.MULTILINE)
    lines = [line for page in PAGES for line in shown.findall(page.read_text())]
    assert lines
    assert [
        line for line in lines if not any(_has_longest_part(line, m) for m in _all_messages())
    ] == []


def test_messages_are_read_from_sources() -> None:
    python = 'raise ValueError(f"no {x} here, " "sorry")\nmessage = f"all {y} is well"\n'
    assert [message.text for message in _python_messages(python, "a.py")] == [
        "no … here, sorry",
        "all … is well",
    ]
    cpp = 'TORCH_CHECK(a > f("b"), "no ", x, " here; (so)"\n " sorry");\nx = "three words here";'
    messages = _cpp_messages(cpp, "a.cpp")
    assert [message.parts for message in messages] == [
        ["here; (so) sorry"],
        ["three words here"],
    ]
    assert _is_from("… here; (so) sorry", messages[0])
    assert not _is_from("… there; (so) sorry", messages[0])
    assert not _has_longest_part("here; sorry", messages[0])
