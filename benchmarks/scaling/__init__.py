# SPDX-License-Identifier: BSD-3-Clause
"""The parts of bench_scaling.py: the settings, a process of a run, the model, and the tables.

settings.py lists the runs, rank.py is one process of a run, process.py counts its resources,
model.py predicts larger groups, and tables.py makes the tables of the page and of the terminal.
"""
