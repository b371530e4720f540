# SPDX-License-Identifier: BSD-3-Clause
"""The folder of the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
