# SPDX-License-Identifier: BSD-3-Clause
"""Runs a test script of another library, whose ranks torchrun starts, over one of the backends.

    torchrun --nproc-per-node 2 library_script.py \\
      cpu:powersgd accelerate.test_utils.scripts.test_ops
"""

from __future__ import annotations

import io
import runpy
import sys

from torch_suite import IN_RANKS

if __name__ == "__main__":
    backend, module = sys.argv[1:]
    # The ranks share a pipe: a line is written as a whole, also where Python does not buffer.
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    IN_RANKS[backend]()
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
