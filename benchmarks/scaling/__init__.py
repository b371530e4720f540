# SPDX-License-Identifier: BSD-3-Clause
"""The parts of bench_scaling.py.

rank.py is one process of a run, model.py predicts larger groups, and tables.py makes the tables.
"""
