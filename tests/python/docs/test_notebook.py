# SPDX-License-Identifier: BSD-3-Clause
"""The notebook of docs/notebooks runs to its end, and is kept without what it shows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.deadline import DEADLOCK
from support.repository import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "one-step.ipynb"
FIGURES = 3
# Sums of ten float32 tensors, each rounded to 6e-8 of its elements.
ROUNDING = 1e-6


def _cells(kind: str) -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def test_the_notebook_is_kept_without_outputs() -> None:
    for cell in _cells("code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


def test_the_links_of_the_notebook_lead_somewhere() -> None:
    text = "".join(line for cell in _cells("markdown") for line in cell["source"])
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


def test_the_notebook_runs_and_its_sums_agree(tmp_path: Path) -> None:
    nbclient, nbformat, *_ = map(
        pytest.importorskip, ("nbclient", "nbformat", "ipykernel", "matplotlib")
    )
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # The folder is that of the kernel. A cell that fails, or hangs, raises an error.
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=int(DEADLOCK), resources=where).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == FIGURES
    printed = "".join(output.get("text", "") for output in outputs)
    assert "Warning" not in printed
    for line in ("average, by hand", "residual of process 0", "less the residuals"):
        (error,) = re.findall(rf"^.*{line}.*: +(\S+)$", printed, re.MULTILINE)
        assert float(error) < ROUNDING, line
    (waiting,) = re.findall(r"after ten steps: +(\S+)", printed)
    assert float(waiting) > 100 * ROUNDING  # else the residuals would prove nothing
    assert len(re.findall(r"loss 0\.\d+$", printed, re.MULTILINE)) == 4
