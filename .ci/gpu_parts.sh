# shellcheck shell=bash
# SPDX-License-Identifier: BSD-3-Clause
#
# The commands of .ci/gpu, which sources it. Exit status 77 means that the machine lacks something,
# which the last line of the output names.

build_bench() { JOBS=$jobs .ci/build_bench_kernels "$architecture"; }

build_extension() {
  CUDA_HOME=$(.ci/cuda_home) || return 77
  export CUDA_HOME
  # Without it a toolkit that is not found would make a build for CPUs alone, which "succeeds".
  export POWERSGD_BUILD_CUDA=1
  "$python" setup.py build_ext --inplace
}

build_kernels() {
  local home generator=() googletest=() sources=/usr/src/googletest
  home=$(.ci/cuda_home) || return 77
  command -v cmake >/dev/null || { echo "there is no cmake" && return 77; }
  command -v ninja >/dev/null && generator=(-G Ninja)
  [[ ! -e build/gpu/cpp/CMakeCache.txt ]] || generator=() # it stays what it was
  # Debian may have the sources alone. A download would wait for a network that is not there.
  [[ ! -d $sources ]] || googletest=("-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=$sources")
  if ! CUDACXX=$home/bin/nvcc cmake -S tests/cpp -B build/gpu/cpp "${generator[@]}" \
    -DPOWERSGD_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$architecture" -DPOWERSGD_GTEST_URL= \
    "${googletest[@]}" >build/gpu/configure.log 2>&1; then
    cat build/gpu/configure.log
    grep -q "GoogleTest is not installed" build/gpu/configure.log || return 1
    echo "GoogleTest is not installed (libgtest-dev)"
    return 77
  fi
  cmake --build build/gpu/cpp --parallel "$jobs" --target kernels_cuda
}

# measure_kernels NAME [VARIABLE=VALUE ...] [-- ARGUMENT ...]: the kernels in this environment.
measure_kernels() {
  local name=$1 variables=()
  shift
  while [[ ${1:---} != -- ]]; do
    variables+=("$1")
    shift
  done
  env "${variables[@]}" build/gpu/bench_kernels --json "$results/$name.json" "${@:2}"
}

test_kernels() { build/gpu/cpp/kernels_cuda --gtest_brief=1; }

# pytest's own process reports what it has found when it is interrupted.
test_python() {
  if ! "$python" -c 'import pytest, numpy'; then
    echo "$python has no pytest or no numpy"
    return 77
  fi
  "$python" -m pytest -v --tb=short --durations=5 -p no:cacheprovider "$@"
}

# sanitize TOOL FILTER: a part of the kernels' tests under compute-sanitizer.
sanitize() {
  local tool=$1 filter=$2 output=build/gpu/sanitizer-$1 result=0 sanitizer
  sanitizer=$(command -v compute-sanitizer || echo "$(.ci/cuda_home)/bin/compute-sanitizer")
  if [[ ! -x $sanitizer ]]; then
    echo "there is no compute-sanitizer"
    return 77
  fi
  "$sanitizer" --tool "$tool" --error-exitcode 1 build/gpu/cpp/kernels_cuda --gtest_brief=1 \
    --gtest_filter="$filter" 2>&1 | tee "$output"
  result=${PIPESTATUS[0]}
  if grep -q "Device not supported" "$output"; then
    echo "compute-sanitizer does not support this device here"
    return 77
  fi
  return "$result"
}

# The functions run in shells of their own, under time limits.
export -f build_bench build_extension build_kernels
export -f measure_kernels test_kernels test_python sanitize
