# SPDX-License-Identifier: BSD-3-Clause
"""The programs of .ci as modules."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from support.repository import ROOT


def load(name: str) -> Any:
    if (folder := str(ROOT / ".ci")) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
