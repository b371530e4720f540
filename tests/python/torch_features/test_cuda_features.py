# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2's hybrid sharding and torch.compile on a GPU: the bodies of the tests on the CPU."""

from __future__ import annotations

import pytest
import test_compile
import test_fsdp

from support.cuda_ranks import needs_cuda, run
from support.fsdp_pairs import WORLD_SIZE
from support.paired_training import OPTIONS

pytestmark = needs_cuda


@pytest.mark.parametrize(("name", "native"), [("int8", False), ("mixed precision", True)])
def test_hybrid_sharding(name: str, native: bool) -> None:
    run(test_fsdp.train_variant, name, native, "cuda", world_size=WORLD_SIZE)


def test_a_compiled_module() -> None:
    pytest.importorskip("triton")
    arguments = ("inductor", True, "cuda")
    run(test_compile.train_compiled, *arguments, options=OPTIONS, timeout=60)
