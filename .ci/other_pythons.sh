#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds the package for the oldest and the newest supported Python of this machine, compiles all
# Python sources with each, and trains on two processes. Pythons are python3.10 and the like on PATH,
# or pyenv's. torch, 5 GB with its libraries, goes into environments that are kept between runs.
#
#   .ci/other_pythons.sh        TORCH=torch==2.13.0   JOBS=2   PYTHON_ENVS=~/.cache/torch-powersgd
. "$(dirname "$0")/copied_tree.sh"
torch=${TORCH:-torch==2.13.0}

# A command on PATH may be a shim of a version that pyenv has not chosen.
builds() {
  "$1" -c 'import ensurepip, os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' \
    2>/dev/null
}

found=()
for version in $(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml); do
  here=
  for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/"python$version"; do
    builds "$python" && here=$python && break
  done
  if [[ $here ]]; then found+=("$here"); else
    echo "NOT CHECKED: Python $version, which this machine does not have"
  fi
done
((${#found[@]})) || exit 0

copy_with .ci benchmarks docs examples tests
export POWERSGD_BUILD_CUDA=0 MAX_JOBS=${JOBS:-2}
for system in $(printf '%s\n' "${found[0]}" "${found[-1]}" | uniq); do
  env=$envs/${system##*/}-${torch//[^a-z0-9.]/-}
  environment "$env" "$system" "torch, numpy, ninja, setuptools" "$torch"
  "$env/bin/python" -m compileall -q -f setup.py setup_support python .ci benchmarks docs examples tests
  PATH=$env/bin:$PATH "$env/bin/python" setup.py --quiet build_ext --inplace
  "$env/bin/python" .ci/two_ranks.py
done
