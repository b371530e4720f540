#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Installs the package from its sdist into a new environment with the torch named by TORCH, and runs
# the sdist's quick tests.
#
#   .ci/sdist_tests.sh        TORCH=torch==2.13.0
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
python=$folder/env/bin/python
pip=("$python" -m pip --disable-pip-version-check install --quiet)
"${pip[@]}" "${TORCH:-torch==2.13.0}" numpy ninja 'setuptools>=77,<82' pytest hypothesis

"$python" setup.py --quiet sdist "--dist-dir=$folder/dist"
"${pip[@]}" --no-build-isolation "$folder"/dist/*.tar.gz
tar -xzf "$folder"/dist/*.tar.gz -C "$folder"
cd "$folder"/torch_powersgd-*
# Test the installed package, not the one in the folder.
rm -r python
"$python" -m pytest -q tests/python/{backend,options,stats,training}
