# SPDX-License-Identifier: BSD-3-Clause
"""The parts of benchmarks/bench_reliability.py: faults.py and restarts.py.

faults.py runs each fault of cases.py in the processes of training.py. tables.py makes the tables.
"""
