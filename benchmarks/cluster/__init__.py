# SPDX-License-Identifier: BSD-3-Clause
"""The parts of benchmarks/bench_cluster.py."""

import sys
from pathlib import Path

# The demo's model and text.
sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
