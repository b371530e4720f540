#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
#
# Compiles the CUDA kernels for the architectures that they are tuned to, or for those given. Prints
# what each kernel takes and how many of its warps a multiprocessor holds. Fails if a float kernel
# spills on one that they are tuned to. Then checks the machine code for architecture 90, with
# cuobjdump and nvdisasm. Where these cannot be had this says so and is not a failure. Needs nvcc, no
# GPU.
#
#   .ci/nvcc_report.sh [architecture ...]        e.g. .ci/nvcc_report.sh 75 120      JOBS=2
set -eu
cd "$(dirname "$0")/.."
architectures=${*:-80 90}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

flags=""
for architecture in $architectures; do
  flags="$flags -gencode=arch=compute_$architecture,code=sm_$architecture"
done
export flags out
# Each source has a log of its own, as the compilers run side by side, the largest first.
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
