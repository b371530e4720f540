# SPDX-License-Identifier: BSD-3-Clause
"""The examples that share examples/training.py: train_lm.py and train_digits.py."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import torch_powersgd as tp
from support import ranks
from support.repository import ROOT

pytest.importorskip("rich")
pytest.importorskip("sklearn")

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("example", ["train_lm", "train_digits"])
def test_an_example_has_the_default_options(example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = importlib.import_module(example).options().parse_args([])
    defaults = tp.Options()
    assert arguments.rank == defaults.matrix_approximation_rank
    assert tp.Options(wire_dtype=arguments.wire_dtype).wire_dtype == defaults.wire_dtype
    assert arguments.exact_steps < arguments.steps / 20


def _script(rank: int, words: list[str]) -> str:
    """Runs train_digits.py on a rank, whose store is the tests'. Returns its output."""
    patch = pytest.MonkeyPatch()

    def init_process_group(backend: str) -> None:
        patch.undo()
        ranks.init_group(backend)

    patch.setattr(dist, "init_process_group", init_process_group)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["train_digits.py", *words]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLES / sys.argv[0]), run_name="__main__")
    return output.getvalue()


def test_the_digits_example_saves_and_resumes(tmp_path: Path) -> None:
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint.pt"
    words = ["--channels", "32", "--exact-steps", "3"]
    words += ["--metrics", str(metrics), "--checkpoint", str(checkpoint)]
    for steps in (5, 8):
        output, _ = ranks.run(2, _script, [*words, "--steps", str(steps)], backend=None)
        assert "validation accuracy" in output
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 9))
    sent = [record["bytes_sent"] for record in records]
    by_step = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    # A resumed run goes on from its step: the exact steps are the first three of all.
    assert by_step[:3] == [by_step[0]] * 3
    assert by_step[3:] == [by_step[3]] * 5
    assert 0 < by_step[3] < by_step[0] / 8
