#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Builds, links and imports the extension against a torch with CUDA, by default the oldest supported
# release, and runs one case of each Python test that depends on torch. It needs nvcc but no GPU.
# torch and its libraries, 5 GB, go into an environment that is kept between runs. If they cannot be
# installed (no network, no space), this prints NOT CHECKED and is not a failure.
#
#   .ci/cuda_torch.sh        CUDA_TORCH=torch==2.11.0   CUDA_ENV=~/.cache/torch-powersgd/<CUDA_TORCH>
. "$(dirname "$0")/copied_tree.sh"

torch=${CUDA_TORCH:-torch==2.11.0}
env=${CUDA_ENV:-$envs/${torch//[^a-z0-9.]/-}}
python=$env/bin/python
log=$tree/log

if ! environment "$env" python3 "torch, rich, pytest, xdist, hypothesis, expecttest" \
  "$torch" rich pytest pytest-xdist hypothesis expecttest >"$log" 2>&1; then
  tail -n 3 "$log"
  rm -rf "$env"
  echo "NOT CHECKED: the build and the tests against a torch with CUDA: $torch could not be installed"
  exit 0
fi
"$python" -c 'import torch; assert torch.version.cuda, f"{torch.__version__} has no CUDA"'

CUDA_HOME=$(.ci/cuda_home)
copy_with docs tests
# For one architecture, because check_kernels.py compiles the kernels for all of them.
export CUDA_HOME POWERSGD_BUILD_CUDA=1 TORCH_CUDA_ARCH_LIST=9.0
PATH=$env/bin:$PATH "$python" setup.py build_ext --inplace >"$log" 2>&1 ||
  { tail -n 60 "$log" && exit 1; }
"$python" -c '
from torch_powersgd import _C
assert _C.has_kernels("cuda") and _C.has_kernels("cpu")'
echo "built, linked and imported against $torch, without a GPU"

# The folders that depend on torch, without slow tests that do not.
cd tests/python
"$python" -m pytest -q --quick -n "${JOBS:-2}" \
  backend training torch_features hostile other_suites cli/test_advise.py \
  --ignore=backend/test_replicas.py --ignore=torch_features/test_elastic.py
