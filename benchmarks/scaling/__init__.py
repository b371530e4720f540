# SPDX-License-Identifier: BSD-3-Clause
"""The parts of bench_scaling.py.

rank.py is one process of a run, model.py predicts larger groups over Gloo, devices.py hosts with
several devices over NCCL, and tables.py makes the tables.
"""
