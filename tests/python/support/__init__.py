# SPDX-License-Identifier: BSD-3-Clause
"""Helpers of the tests. conftest.py makes them importable, in the processes that tests start too."""
