# SPDX-License-Identifier: BSD-3-Clause
"""README and docs: every block runs or says why not, and messages and links exist."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import torch_powersgd
from support import markdown_blocks, user_messages
from support.markdown_blocks import LANGUAGES, PAGES, PROGRAMS, SHELL, BadBlock, Block
from support.repository import ROOT

MARKDOWN = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
API = ROOT / "docs" / "api.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
EXAMPLE = ROOT / "examples" / "minimal.py"

# This model stands where the docs have one of the reader's.
MODELS = """
import torch


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64))


def train_step(model):
    model(torch.randn(8, 256)).square().mean().backward()
"""


def _blocks(languages: set[str]) -> list[Block]:
    found = []
    for page in PAGES:
        # test_every_block_runs_or_says_why_not reports a page with a bad block.
        with contextlib.suppress(BadBlock):
            found += markdown_blocks.blocks_of_page(page)
    return [block for block in found if block.language in languages]


def _to_run(languages: set[str]) -> list[object]:
    blocks = [block for block in _blocks(languages) if not block.why_not]
    return [pytest.param(block, id=block.place) for block in blocks]


@pytest.mark.parametrize("block", _to_run(PROGRAMS))
def test_a_program_of_the_docs_runs(block: Block, tmp_path: Path) -> None:
    markdown_blocks.run_block(block, tmp_path)


@pytest.mark.parametrize("block", _to_run(SHELL))
def test_a_command_of_the_docs_runs(block: Block, tmp_path: Path) -> None:
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    if EXAMPLE.exists():
        (tmp_path / "train.py").write_text(EXAMPLE.read_text())
    (tmp_path / "mymodels.py").write_text(MODELS)
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "models.py").write_text(MODELS)
    package = Path(torch_powersgd.__file__).parents[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        ["bash", "-eu", "-c", block.code],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]


@pytest.mark.parametrize("block", [pytest.param(block, id=block.place) for block in _blocks(SHELL)])
def test_a_command_of_the_docs_is_well_formed(block: Block) -> None:
    parsed = subprocess.run(
        ["bash", "-n"], input=block.code, capture_output=True, text=True, check=False
    )
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.parametrize(
    "block", [pytest.param(block, id=block.place) for block in _blocks(PROGRAMS)]
)
def test_a_program_of_the_docs_compiles(block: Block) -> None:
    compile(block.program(), block.place, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    markdown_blocks.blocks_of_page(page)  # raises otherwise


def _page(*lines: str) -> str:
    return "\n".join(lines) + "\n"


def test_the_comments_of_blocks() -> None:
    text = _page(
        "<!-- not run: it needs two machines -->",
        "```bash",
        "torchrun",
        "```",
        "",
        "<!-- run with: mesh, 4 ranks -->",
        "```python",
        "x = 1",
        "```",
        "",
        "- item",
        "",
        "    ```text",
        "    said",
        "    ```",
    )
    shell, python, said = markdown_blocks.blocks_of(text, "page.md")
    assert (shell.why_not, shell.language) == ("it needs two machines", "bash")
    assert (python.preamble, python.world_size, python.line) == ("mesh", 4, 7)
    assert said.code == "said\n"


@pytest.mark.parametrize(
    "lines",
    [
        ("```", "unknown", "```"),
        ("```console", "$ x", "```"),
        ("```python", "x"),
        ("<!-- not run -->", "```python", "x", "```"),
        ("<!-- not run: slow -->", "```python", "x", "```"),
        ("<!-- run with: -->", "```python", "x", "```"),
        ("<!-- run with: ddp -->", "```bash", "x", "```"),
        ("<!-- run with: ddp -->", "", "```python", "x", "```"),
        ("<!-- not run: it is only text -->", "```text", "x", "```"),
        ("Text.", "", "    indented", ""),
    ],
)
def test_a_block_without_a_right_comment_is_found(lines: Any) -> None:
    with pytest.raises(BadBlock, match=r"page.md:\d"):
        markdown_blocks.blocks_of(_page(*lines), "page.md")


def test_the_program_of_a_diff_is_what_it_leads_to() -> None:
    code = "--- a\n+++ b\n@@ -1 +1 @@\n import x\n-old()\n+new()\n"
    assert Block("page.md", 1, "diff", code).program() == "import x\nnew()\n"


def test_a_block_that_fails_is_found(tmp_path: Path) -> None:
    block = Block("page.md", 41, "python", "import torch\ntorch.no_such_function()\n")
    with pytest.raises(Exception, match=r'page.md", line 43'):
        markdown_blocks.run_block(block, tmp_path)


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as repository hosts and the site both make them."""
    anchors = set()
    for _, line in markdown_blocks.lines_of(text, without=LANGUAGES):
        heading = re.match(r"#+ (.*)", line)
        if heading:
            words = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading[1]).lower()
            anchors.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return anchors


def _dead_links(text: str, folder: Path) -> list[str]:
    dead = []
    for _, line in markdown_blocks.lines_of(text, without=LANGUAGES):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if re.match(r"\w+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = folder / name
            page = path.read_text() if name.endswith(".md") and path.exists() else text
            if (name and not path.exists()) or (anchor and anchor not in _anchors(page)):
                dead.append(target)
    return dead


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert _dead_links(page.read_text(), page.parent) == []


def _unknown_tests(text: str) -> list[str]:
    """The files of tests that a page names and that do not exist."""
    known = {path.name for path in (ROOT / "tests").rglob("test_*")}
    return [name for name in re.findall(r"\btest_\w+\.(?:py|cpp)\b", text) if name not in known]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_named_tests_exist(page: Path) -> None:
    assert _unknown_tests(page.read_text()) == []


def test_an_unknown_test_is_found() -> None:
    assert _unknown_tests("`test_docs.py`, `tests/cpp/test_gone.cpp`") == ["test_gone.cpp"]


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `title`, or *two*\n")
    text = "# Here\n[a](there.md#a-title-or-two) [b](#here) [c](gone.md) [d](there.md#no) [e](#x)\n"
    assert _dead_links(text, tmp_path) == ["gone.md", "there.md#no", "#x"]


@pytest.mark.parametrize(
    ("page", "program"),
    [
        ("options", ["_options.py"]),
        ("performance", ["_tables.py", "performance"]),
        ("convergence", ["_tables.py", "convergence"]),
        ("scaling", ["_tables.py", "scaling"]),
        ("reliability", ["_tables.py", "reliability"]),
    ],
)
def test_a_page_is_what_its_program_makes(page: str, program: list[str]) -> None:
    command = [sys.executable, *program]
    made = subprocess.run(
        command, cwd=ROOT / "docs", capture_output=True, text=True, timeout=100, check=True
    ).stdout
    remedy = f"python docs/{program[0]} --write"
    assert (ROOT / "docs" / f"{page}.md").read_text() == made, remedy


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(
        r"^::: torch_powersgd\.(?:\w+\.)?(\w+)$", API.read_text(), flags=re.MULTILINE
    )
    assert sorted(shown) == sorted({*torch_powersgd.__all__} - {"__version__"})


def test_the_tables_of_the_api_page_have_every_public_name_and_method() -> None:
    listed = re.findall(r"^\| `(\w+)", API.read_text(), flags=re.MULTILINE)
    methods = [name for name in vars(torch_powersgd.Compression) if not name.startswith("_")]
    names = {*torch_powersgd.__all__} - {"__version__"}
    attributes = ["group", "options", "str"]  # and what str() returns
    heads = ["torch_powersgd", "compression"]
    assert sorted(listed) == sorted([*names, *methods, *attributes, *heads])


def test_troubleshooting_quotes_messages_that_exist() -> None:
    messages = user_messages.all_messages()
    quoted = list(user_messages.quoted_on(TROUBLESHOOTING.read_text()))
    assert len(quoted) > 50
    own = [text for text in quoted if not text.startswith(OF_OTHERS)]
    gone = [text for text in own if not any(user_messages.is_from(text, m) for m in messages)]
    assert gone == []


# Messages of torch and of the tools around it, which the page explains as well.
OF_OTHERS = ("Unknown c10d backend type", "Timed out waiting", "No backend of type", "/usr/bin/ld")


def test_troubleshooting_has_every_message() -> None:
    quoted = list(user_messages.quoted_on(TROUBLESHOOTING.read_text()))
    missing = [
        f"{message.place}: {message.text}"
        for message in user_messages.all_messages()
        if not message.place.startswith(NOT_SHOWN)
        and not any(user_messages.shows(text, message) for text in quoted)
    ]
    assert missing == []


# All checks of options in the core have one form, which has one row. Commands explain their errors
# themselves. The rest becomes part of other messages, or asserts what no user can break.
NOT_SHOWN = (
    "csrc/plan/options.cpp",
    "include/powersgd/option_table.h",
    "csrc/gradients/flat_tensors.cpp",
    "csrc/engine/work.cpp",
    "python/torch_powersgd/summary.py",
    "python/torch_powersgd/__main__.py",
    "python/torch_powersgd/tools/",
)


SAID = re.compile(r"^(?:torch_powersgd: |[A-Z]+:torch_powersgd:)(.*)", flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shown_log_lines_exist(page: Path) -> None:
    messages = user_messages.all_messages()
    lines = SAID.findall(page.read_text())
    unknown = [line for line in lines if not any(_is_instance(line, m) for m in messages)]
    assert unknown == []


def _is_instance(line: str, message: user_messages.Message) -> bool:
    """True if a line has the longest fixed part of a message. Others may be optional."""
    return max(message.parts, key=len) in line


def test_a_shown_line_that_does_not_exist_is_found() -> None:
    message = user_messages.Message("a.py:1", "rank … waits for long … seconds")
    assert _is_instance("rank 1 waits for long 2 seconds", message)
    assert not _is_instance("rank 1 waits long 2 seconds", message)


def test_messages_are_read_from_sources() -> None:
    python = 'raise ValueError(f"no {x} here, " "sorry")\nmessage = f"all {y} is well"\n'
    assert [m.text for m in user_messages.python_messages(python, "a.py")] == [
        "no … here, sorry",
        "all … is well",
    ]
    cpp = 'TORCH_CHECK(a > f("b"), "no ", x, " here; (so)"\n " sorry");\nx = "three words here";'
    messages = user_messages.cpp_messages(cpp, "a.cpp")
    assert [message.parts for message in messages] == [
        ["here; (so) sorry"],
        ["three words here"],
    ]
    assert user_messages.is_from("… here; (so) sorry", messages[0])
    assert not user_messages.is_from("… there; (so) sorry", messages[0])
