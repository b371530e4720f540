# SPDX-License-Identifier: BSD-3-Clause
"""The parts of bench_stages.py and bench_step.py."""
