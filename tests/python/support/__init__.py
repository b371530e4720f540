# SPDX-License-Identifier: BSD-3-Clause
"""Helpers of the tests, importable by conftest.py, in the processes that tests start as well."""
