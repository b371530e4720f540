#!/bin/sh
# SPDX-License-Identifier: BSD-3-Clause
#
# Compiles the CUDA kernels for sm_80, sm_90 and sm_100 and prints what each kernel takes. Fails if
# a float kernel of rank <= 8 spills. Needs nvcc, no GPU.
#
#   .ci/nvcc_report.sh [architecture ...]        e.g. .ci/nvcc_report.sh 90      JOBS=2
set -eu
cd "$(dirname "$0")/.."
architectures=${*:-80 90 100}
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
  nvcc -std=c++17 -Iinclude -Icsrc -Xcompiler -Wall -Xptxas -v $flags -c "$1" -o "$out/$name.o" \
    2>"$out/$name.log"' sh {} || { cat "$out"/*.log >&2; exit 1; }
cat "$out"/*.log >"$out/log"
grep -i warning "$out/log" >&2 || true

c++filt <"$out/log" | python3 -c '
import re, sys

rows, name, arch, stack = {}, None, None, (0, 0, 0)
for line in sys.stdin:
    if m := re.search(r"Compiling entry function .(.*). for .sm_(\w+).", line):
        name = m[1].split("(anonymous namespace)::")[-1].split("(")[0]
        name = name.replace("unsigned short", "u16").replace("powersgd::kernels::cuda::", "")
        arch = m[2]
    elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line):
        stack = tuple(map(int, m.groups()))
    elif (m := re.search(r"Used (\d+) registers", line)) and name is not None:
        rows[name, arch] = (int(m[1]),) + stack
archs = sorted({arch for _, arch in rows}, key=lambda a: int(re.sub(r"\D", "", a)))
print("registers / stack bytes / spilled bytes".ljust(52), *(f"sm_{a}".rjust(16) for a in archs))
failed = False
for kernel in sorted({kernel for kernel, _ in rows}):
    cells = []
    for arch in archs:
        registers, frame, stores, loads = rows[kernel, arch]
        cells.append(f"{registers} / {frame} / {stores + loads}".rjust(16))
        rank = re.search(r"<(\d+)", kernel)
        low = (rank is None or int(rank[1]) <= 8) and "double" not in kernel
        failed |= low and stores + loads > 0
    print(kernel.ljust(52), *cells)
sys.exit("a kernel of rank <= 8 spills" if failed else 0)
'
