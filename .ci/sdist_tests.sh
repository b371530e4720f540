#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Installs the package from its sdist into a new environment with the torch named by TORCH, and runs
# the sdist's quick tests.
#
#   .ci/sdist_tests.sh        TORCH=torch==2.13.0
. "$(dirname "$0")/copied_tree.sh"
python=$tree/env/bin/python

environment "$tree/env" python3 torch "${TORCH:-torch==2.13.0}" pytest hypothesis
"$python" setup.py --quiet sdist "--dist-dir=$tree/dist"
"$python" -m pip --disable-pip-version-check install --quiet --no-build-isolation "$tree"/dist/*
tar -xzf "$tree"/dist/*.tar.gz -C "$tree"
cd "$tree"/torch_powersgd-*
# Test the installed package, not the one in the folder.
rm -r python
"$python" -m pytest -q tests/python/{backend,options,stats,training}
