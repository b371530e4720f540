# SPDX-License-Identifier: BSD-3-Clause
# shellcheck shell=bash
#
# What the scripts share that build the package with another torch or Python. They work in $tree,
# a copy, because the checkout holds objects of its own torch and Python.
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null
envs=${PYTHON_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/torch-powersgd}
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT

# environment FOLDER PYTHON MODULES PACKAGE...: unless the environment has the modules, makes it.
environment() {
  "$1/bin/python" -c "import $3" 2>/dev/null && return
  rm -rf "$1"
  "$2" -m venv "$1" && "$1/bin/python" -m pip --disable-pip-version-check --no-cache-dir install \
    --quiet numpy ninja 'setuptools>=77,<82' "${@:4}"
}

# copy_with FOLDER...: copies the package's sources and these folders, and enters the copy.
copy_with() {
  cp -r setup.py setup_support pyproject.toml LICENSE README.md csrc include python "$@" "$tree"
  rm -f "$tree"/python/torch_powersgd/_C*.so
  cd "$tree"
  export PYTHONPATH=$tree/python
  export CCACHE_BASEDIR=$tree CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
  if command -v ccache >/dev/null; then export PATH=/usr/lib/ccache:$PATH; fi
}
