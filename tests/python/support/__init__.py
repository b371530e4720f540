# SPDX-License-Identifier: BSD-3-Clause
"""Test helpers. conftest.py makes them importable, also in processes that tests start."""
