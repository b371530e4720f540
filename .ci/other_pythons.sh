#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds the package for the oldest and the newest supported Python of this machine, compiles all
# Python sources with each, and trains on two processes. Pythons are python3.10 and the like on PATH,
# or pyenv's. torch, 5 GB with its libraries, goes into environments that are kept between runs.
#
#   .ci/other_pythons.sh        TORCH=torch==2.13.0   JOBS=2   PYTHON_ENVS=~/.cache/torch-powersgd
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

torch=${TORCH:-torch==2.13.0}
envs=${PYTHON_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/torch-powersgd}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

# A command on PATH may be a shim of a version that pyenv has not chosen.
builds() {
  "$1" -c 'import ensurepip, os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' \
    2>/dev/null
}

found=()
missing=()
for version in $(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml); do
  here=
  for python in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/"python$version"; do
    builds "$python" && here=$python && break
  done
  if [[ $here ]]; then found+=("$here"); else missing+=("$version"); fi
done
((${#missing[@]} == 0)) || echo "NOT CHECKED: Python ${missing[*]}, which this machine does not have"
((${#found[@]})) || exit 0

# In a copy, because objects of another Python lie in the checkout.
cp -r setup.py setup_support pyproject.toml LICENSE README.md csrc include python .ci \
  benchmarks docs examples tests "$tree"
rm -f "$tree"/python/torch_powersgd/_C*.so
cd "$tree"
command -v ccache >/dev/null && export PATH=/usr/lib/ccache:$PATH
export CCACHE_BASEDIR=$tree CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
export POWERSGD_BUILD_CUDA=0 MAX_JOBS=${JOBS:-2} PYTHONPATH=$tree/python

for system in $(printf '%s\n' "${found[0]}" "${found[-1]}" | uniq); do
  env=$envs/${system##*/}-${torch//[^a-z0-9.]/-}
  python=$env/bin/python
  if ! "$python" -c 'import torch, numpy, ninja, setuptools' 2>/dev/null; then
    rm -rf "$env"
    "$system" -m venv "$env"
    "$python" -m pip --disable-pip-version-check --no-cache-dir install --quiet \
      "$torch" numpy ninja 'setuptools>=77,<82'
  fi
  "$python" -m compileall -q -f setup.py setup_support python .ci benchmarks docs examples tests
  PATH=$env/bin:$PATH "$python" setup.py --quiet build_ext --inplace
  "$python" .ci/two_ranks.py
done
