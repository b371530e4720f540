# SPDX-License-Identifier: BSD-3-Clause
"""Makes the helpers beside the tests importable, in the ranks' processes too."""

import os
import sys

_here = os.path.dirname(__file__)
sys.path.insert(0, _here)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_here, os.environ.get("PYTHONPATH")]))
