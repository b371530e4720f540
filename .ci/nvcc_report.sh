#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
#
# Compiles the CUDA kernels for those architectures of a release that have 8.0's instructions, or for
# those given. Prints each kernel's resources and how many of its warps fit on a multiprocessor.
# Fails if a kernel spills on an architecture that it is tuned for, or at the default matrix rank on
# any. Then checks the machine code for architecture 90 with cuobjdump and nvdisasm. If these cannot
# be installed, this prints NOT CHECKED and is not a failure. It needs nvcc but no GPU.
#
#   .ci/nvcc_report.sh [architecture ...]        e.g. .ci/nvcc_report.sh 75 120      JOBS=2
set -eu
cd "$(dirname "$0")/.."
architectures=${*:-80 90 100 120}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

flags=""
for architecture in $architectures; do
  flags="$flags -gencode=arch=compute_$architecture,code=sm_$architecture"
done
export flags out
# Compilers run in parallel, the largest source first. Each source has its own log.
# shellcheck disable=SC2016
ls -S csrc/kernels/cuda/*.cu | xargs -P "${JOBS:-2}" -I{} sh -c '
  name=$(basename "$1" .cu)
  nvcc -std=c++17 -O3 -Iinclude -Icsrc -Xcompiler -Wall -Xptxas -v $flags -c "$1" \
    -o "$out/$name.o" 2>"$out/$name.log"' sh {} || { cat "$out"/*.log >&2; exit 1; }
cat "$out"/*.log >"$out/log"
grep -i warning "$out/log" >&2 || true
status=0
c++filt <"$out/log" | python3 .ci/nvcc_report.py || status=1

case " $architectures " in *" 90 "*) ;; *) exit $status ;; esac
if ! tools=$(.ci/cuda_disassembler 2>"$out/why"); then
  tail -n 3 "$out/why"
  echo "NOT CHECKED: the machine code of the kernels"
  exit $status
fi
for object in "$out"/*.o; do
  PATH=$tools:$PATH cuobjdump -sass -arch sm_90 "$object"
done >"$out/sass"
c++filt <"$out/sass" | python3 .ci/check_sass.py || status=1
exit $status
