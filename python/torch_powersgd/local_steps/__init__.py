# SPDX-License-Identifier: BSD-3-Clause
"""Local steps: each process trains on its own, and the changes are averaged at intervals.

``steps.py`` counts the steps and makes the rounds, ``fragment.py`` is one round of some parameters,
and ``diloco.py`` has an outer optimizer.
"""

from torch_powersgd.local_steps.diloco import DiLoCo
from torch_powersgd.local_steps.steps import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
