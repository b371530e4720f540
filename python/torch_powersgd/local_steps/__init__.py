# SPDX-License-Identifier: BSD-3-Clause
"""Local steps: each process trains on its own, and the changes are averaged at intervals.

``schedule.py`` says when rounds begin and end, ``rounds.py`` makes them, ``fragment.py`` is one
round of some parameters, and ``diloco.py`` has an outer optimizer. ``steps.py`` is the interface.
The other files check, save, count and watch.
"""

from torch_powersgd.local_steps.diloco import DiLoCo
from torch_powersgd.local_steps.steps import LocalSGD

__all__ = ["DiLoCo", "LocalSGD"]
