#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds, links and imports the extension against a torch with CUDA, by default the oldest supported
# release, and runs the Python tests that depend on torch. It needs nvcc but no GPU. torch and its
# libraries, 5 GB, go into an environment that is kept between runs. If they cannot be installed (no
# network, no space), this prints NOT CHECKED and is not a failure.
#
#   .ci/cuda_torch.sh        CUDA_TORCH=torch==2.11.0   CUDA_ENV=~/.cache/torch-powersgd/<CUDA_TORCH>
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

torch=${CUDA_TORCH:-torch==2.11.0}
env=${CUDA_ENV:-${XDG_CACHE_HOME:-$HOME/.cache}/torch-powersgd/${torch//[^a-z0-9.]/-}}
python=$env/bin/python
log=$(mktemp)
tree=$(mktemp -d)
trap 'rm -rf "$log" "$tree"' EXIT

if ! "$python" -c 'import torch, rich, pytest, xdist, hypothesis, expecttest' 2>/dev/null; then
  rm -rf "$env"
  if ! { python3 -m venv "$env" &&
    "$env/bin/pip" --disable-pip-version-check --no-cache-dir install --quiet \
      "$torch" numpy ninja 'setuptools>=77,<82' rich pytest pytest-xdist hypothesis \
      expecttest; } >"$log" 2>&1; then
    tail -n 3 "$log"
    rm -rf "$env"
    echo "NOT CHECKED: the build and the tests against a torch with CUDA: $torch could not be installed"
    exit 0
  fi
fi
"$python" -c 'import torch; assert torch.version.cuda, f"{torch.__version__} has no CUDA"'

CUDA_HOME=$(.ci/cuda_home)
# Builds in a copy, to keep the objects for the other torch, and for one architecture, because
# check_kernels.py compiles the kernels for all of them.
cp -r setup.py setup_support pyproject.toml LICENSE README.md csrc docs include python tests "$tree"
rm -f "$tree"/python/torch_powersgd/_C*.so
cd "$tree"
export CUDA_HOME POWERSGD_BUILD_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0
command -v ccache >/dev/null && export PATH=/usr/lib/ccache:$PATH
export CCACHE_BASEDIR=$tree CCACHE_NOHASHDIR=1
if ! PATH=$env/bin:$PATH "$python" setup.py build_ext --inplace >"$log" 2>&1; then
  tail -n 60 "$log"
  exit 1
fi
export PYTHONPATH=$tree/python
"$python" -c '
from torch_powersgd import _C
assert _C.has_kernels("cuda") and _C.has_kernels("cpu")'
echo "built, linked and imported against $torch, without a GPU"

# The folders that depend on torch, without slow tests that do not.
cd tests/python
"$python" -m pytest -q -n "${JOBS:-2}" \
  backend training torch_features hostile other_suites cli/test_advise.py \
  --ignore=backend/test_replicas.py --ignore=torch_features/test_elastic.py
