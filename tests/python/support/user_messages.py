# SPDX-License-Identifier: BSD-3-Clause
"""The errors and log lines of the sources: texts in which each variable part is an ellipsis."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from support.repository import ROOT

GAP = "…"
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
        return parts_of(self.text)


def parts_of(text: str) -> list[str]:
    """The fixed parts of a text, in their order, without those that say too little."""
    parts = [" ".join(part.split()) for part in text.split(GAP)]
    return [part for part in parts if len(part) >= _SHORTEST]


def all_messages() -> list[Message]:
    """The messages of the package and of its core. Kernels and bindings have no messages."""
    found = []
    for path in sorted((ROOT / "python").rglob("*.py")):
        found += python_messages(path.read_text(), str(path.relative_to(ROOT)))
    for folder in ("csrc", "include"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".h", ".cpp"} and not {"kernels", "bindings"} & {*path.parts}:
                found += cpp_messages(path.read_text(), str(path.relative_to(ROOT)))
    return [message for message in found if message.parts]


def python_messages(source: str, place: str) -> list[Message]:
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
            if text.strip(f" {GAP}").count(" ") >= fewest:
                found.append(Message(f"{place}:{node.lineno}", text))
    return found


def _text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(value) for value in node.values)
    if isinstance(node, ast.IfExp):
        return _text_of(node.body)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text_of(node.left) + _text_of(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return _CPP_FORMAT.sub(GAP, _text_of(node.left))
    return GAP


def cpp_messages(source: str, place: str) -> list[Message]:
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
        if " " in text.strip(f" {GAP}"):
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
        pieces += [GAP if between.strip(" ,\n") else "", literal[1].replace('\\"', '"')]
        end = literal.end()
    pieces.append(GAP if arguments[end:].strip() else "")
    return _CPP_FORMAT.sub(GAP, "".join(pieces))


def quoted_on(page: str) -> Iterator[str]:
    """The messages that a page of Markdown quotes: code in the first column of its tables."""
    for line in page.splitlines():
        first = re.match(r"^\| (`+)(.+?)\1 \|", line)
        if first:
            yield first[2].replace("\\|", "|").strip()


def is_from(quoted: str, message: Message) -> bool:
    """True if the message has all fixed parts of a quotation, in their order."""
    position, whole = 0, " ".join(message.text.split())
    for part in parts_of(quoted):
        position = whole.find(part, position)
        if position < 0:
            return False
        position += len(part)
    return bool(parts_of(quoted))


def shows(quoted: str, message: Message) -> bool:
    """True if a quotation is of this message and has its longest fixed part."""
    return is_from(quoted, message) and max(message.parts, key=len) in quoted
