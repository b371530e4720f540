# SPDX-License-Identifier: BSD-3-Clause
"""Makes ``support`` importable, in the processes that tests start too, and ``setup_support``."""

import os
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

sys.path[:0] = [str(_FOLDER), str(_FOLDER.parents[1])]
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(_FOLDER), os.environ.get("PYTHONPATH")])
)
