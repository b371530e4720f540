# SPDX-License-Identifier: BSD-3-Clause
"""bench_scaling.py's parts: the settings, a rank of a run, the model, and the tables.

settings.py lists the runs, rank.py is one rank of a run, process.py counts what a process has,
model.py predicts larger groups, and tables.py makes the tables of the page and of the terminal.
"""
