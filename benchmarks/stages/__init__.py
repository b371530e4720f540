# SPDX-License-Identifier: BSD-3-Clause
"""The parts of bench_stages.py, bench_model.py and bench_step.py."""
