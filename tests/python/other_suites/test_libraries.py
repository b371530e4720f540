# SPDX-License-Identifier: BSD-3-Clause
"""Test scripts that Accelerate ships end over this backend as they do over gloo, on two ranks.

The wheels of Lightning and transformers bring no such scripts. ``test_ddp_comm_hook`` of Accelerate
needs a GPU. ``test_distributed_data_loop`` did not end within 200 s over gloo on the CPU.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import pytest
import suite_record
from torch_suite import ATTACHED, GLOO, POWERSGD

from support.torchrun import torchrun

pytest.importorskip("accelerate")

SCRIPTS = ("test_ops", "test_script", "test_sync")
_ENDED: dict[str, list[str]] = {}


@functools.cache
def _said(script: str, backend: str) -> list[str]:
    """The lines that name a test or its success, sorted, because ranks print in any order."""
    module = f"accelerate.test_utils.scripts.{script}"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(__file__).with_name("library_script.py")
        ended = torchrun(program, backend, module, ACCELERATE_USE_CPU="true", HF_HOME=folder)
    return sorted(line for line in ended.stdout.splitlines() if re.search("[Tt]est|pass", line))


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("backend", [POWERSGD, ATTACHED])
def test_a_script_of_accelerate_ends_as_over_gloo(script: str, backend: str) -> None:
    assert _said(script, GLOO)
    assert _said(script, backend) == _said(script, GLOO)
    _ENDED.setdefault(backend, []).append(script)
    ended = {"tests": len(SCRIPTS), "passed": len(_ENDED[backend]), "skipped": 0}
    suite_record.add("Accelerate", backend, 2, {**ended, "fail over gloo": 0, "differences": {}})
