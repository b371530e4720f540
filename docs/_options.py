# SPDX-License-Identifier: BSD-3-Clause
"""Prints docs/options.md, made from the docstring and defaults of Options. --write writes it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path

import torch_powersgd

PAGE = Path(__file__).with_name("options.md")

HEAD = """\
# Options

<!-- made by docs/_options.py from the docstring of Options: edit that, then run it with --write -->

This page lists every field of `torch_powersgd.Options`. [Choose your settings](choose.md) says
which of them to set.

## Where options come from

Each field is looked up in this order, and the first place that has it decides:

1. the options that are given to `attach`
2. `pg_options` of the process group
3. `torch_powersgd.configure(options)`
4. the environment variables `POWERSGD_*`
5. the defaults below

The first two take a mapping or `Options`, and these differ:

| given to `attach` | matrix rank | everything else |
|---|---|---|
| nothing | the group's | the group's options |
| `{"matrix_approximation_rank": 8}` | 8 | the group's options |
| `Options(matrix_approximation_rank=8)` | 8 | the defaults below |

So a mapping replaces single fields of what the later places say, and a complete `Options` hides all
of them. `Options.hook_defaults(...)` is a complete `Options` too, with the defaults of torch's
hook: matrix rank 1 in float32, after 1000 exact steps.

The environment variable of a field is `POWERSGD_` with the field's name in capitals, such as
`POWERSGD_MATRIX_APPROXIMATION_RANK=16`. A truth value is `1`, `true`, `0` or `false`, a data type
its name, such as `bfloat16`. [`POWERSGD_HOST`](hosts.md#which-processes-share-a-host) names the
host. Any other variable that begins with `POWERSGD_` is warned about.

All processes must have equal options. If they differ, every process raises an error that names the
field and the processes.

## Fields

A *step* is a backward pass whose gradients are averaged: one for all micro-batches that you
accumulate in `no_sync()`. With local steps, one average stands for it.

"""


def main() -> None:
    page = HEAD + _table()
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page)
    else:
        sys.stdout.write(page)


def _table() -> str:
    meanings = _meanings(inspect.getdoc(torch_powersgd.Options) or "")
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(torch_powersgd.Options):
        default = field.default if isinstance(field.default, str) else repr(field.default)
        shown = f'"{default}"' if isinstance(field.default, str) else default
        meaning = meanings.pop(field.name).replace("|", "\\|")
        lines.append(f"| `{field.name}` | `{shown}` | {meaning} |")
    if meanings:
        raise ValueError(f"the docstring describes {', '.join(meanings)}, which are no fields")
    return "\n".join(lines) + "\n"


def _meanings(docstring: str) -> dict[str, str]:
    """The text for each field in the Args section."""
    section = docstring.split("Args:\n")[1].split("\n\n")[0]
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)[1:]
    texts = (" ".join(text.split()) for text in entries[1::2])
    # Literals have two backticks in a docstring, one in Markdown. A product of fields has
    # asterisks, which Markdown would read as emphasis.
    marked = (re.sub(r"`+", "`", text).replace(" * ", " x ") for text in texts)
    return dict(zip(entries[::2], marked, strict=True))


if __name__ == "__main__":
    main()
