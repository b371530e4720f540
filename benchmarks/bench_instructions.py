# SPDX-License-Identifier: BSD-3-Clause
"""How many instructions do the CPU stages take per element? A noisy machine does not change it.

    python benchmarks/bench_instructions.py --models resnet18 --ranks 1 2 4 8

Compiles the stages without torch, and counts a step of them under callgrind (valgrind), on the
widest vectors that valgrind knows: AVX2, where a machine may have AVX-512. The floor of
bench_stages.py, five passes, is five loads or stores of 8 elements: 0.63 per element.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import shapes
import torch
from report import Record, Table, add_files, in_turn, processor, provenance, recorded, show, write
from stages.contestants import STAGES

from torch_powersgd.tools.footprint import buckets_of

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "bfloat16")


def build(folder: Path) -> Path:
    """The program that callgrind runs, with the flags of setup.py."""
    program = folder / "once"
    sources = [*ROOT.glob("csrc/plan/*.cpp"), *ROOT.glob("csrc/kernels/cpu/**/*.cpp")]
    sources.append(ROOT / "benchmarks/stages/once.cpp")
    includes = [f"-I{ROOT / name}" for name in ("include", "csrc")]
    command = ["c++", "-std=c++17", "-O3", *includes, *map(str, sources), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def count(program: Path, model: str, rank: int, dtype: str) -> dict[str, float]:
    """Instructions per element of the gradient, by stage."""
    layout = buckets_of([list(s) for s in shapes.MODELS[model]()], getattr(torch, dtype))
    text = "\n\n".join("\n".join(" ".join(map(str, s)) for s in bucket) for bucket in layout)
    elements = sum(math.prod(shape) for bucket in layout for shape in bucket)
    totals: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        valgrind = ["valgrind", "--tool=callgrind", "--collect-atstart=no", "-q"]
        subprocess.run(
            [*valgrind, f"--callgrind-out-file={folder}/out", program, dtype, str(rank)],
            input=text,
            text=True,
            check=True,
        )
        for dump in Path(folder).iterdir():
            said = dump.read_text()
            stage = re.search(r"^desc: Trigger: Client Request: (\w+)$", said, re.MULTILINE)
            summary = re.search(r"^(?:summary|totals): (\d+)$", said, re.MULTILINE)
            if stage and summary:
                totals[stage[1]] += int(summary[1])
    return {stage: totals[stage] / elements for stage in STAGES}


def measure(arguments: argparse.Namespace) -> Record:
    lacks = [name for name in ("valgrind", "c++") if not shutil.which(name)]
    if lacks:
        sys.exit(f"bench_instructions cannot run here; missing: {', '.join(lacks)}")
    record: Record = {**provenance(processor()), "results": []}
    todo = list(itertools.product(arguments.models, arguments.dtypes, arguments.ranks))
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        for model, dtype, rank in in_turn(todo, lambda case: f"{case[0]}, {case[1]}, {case[2]}"):
            counted = count(program, model, rank, dtype)
            case = {"model": model, "dtype": dtype, "rank": rank}
            record["results"].append({**case, "per_element": counted})
            write(record, arguments.json)
    return record


def table(record: Record) -> Table:
    rows = []
    for result in record["results"]:
        numbers = [*result["per_element"].values(), sum(result["per_element"].values())]
        case = [result["model"], result["dtype"], str(result["rank"])]
        rows.append([*case, *(f"{number:.2f}" for number in numbers)])
    return ["model", "dtype", "rank", *STAGES, "all"], rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet18"], choices=shapes.MODELS)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=DTYPES)
    add_files(parser, "after every case")
    record = recorded(parser.parse_args(), measure)
    show(record, {"instructions per element, under callgrind": table(record)})


if __name__ == "__main__":
    main()
