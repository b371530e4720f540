# SPDX-License-Identifier: BSD-3-Clause
"""Uses of the collectives whose results two backends must share, bit for bit."""

from support.collectives import composite, movement, reduction
from support.collectives.case import CASES, run_case

__all__ = ["CASES", "composite", "movement", "reduction", "run_case"]
