# SPDX-License-Identifier: BSD-3-Clause
"""Runs a test script of another library, whose ranks torchrun starts, over one of the backends.

    torchrun --nproc-per-node 2 -m support.library_script \\
      cpu:powersgd accelerate.test_utils.scripts.test_ops
"""

import runpy
import sys

from support.torch_suite import IN_RANKS

if __name__ == "__main__":
    backend, module = sys.argv[1:]
    IN_RANKS[backend]()
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
