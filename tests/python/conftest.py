# SPDX-License-Identifier: BSD-3-Clause
"""Makes ``support`` importable, in the processes that tests start too.

Tests also import ``setup_support`` and the modules of the benchmarks.
"""

import os
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_ROOT = _FOLDER.parents[1]

sys.path[:0] = [str(_FOLDER), str(_ROOT), str(_ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH")])
)
