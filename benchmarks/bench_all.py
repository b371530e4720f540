# SPDX-License-Identifier: BSD-3-Clause
"""Reruns the benchmarks behind the figures in the docs.

    make bench                      all parts, the same as: python benchmarks/bench_all.py
    make bench PART=cluster         one part
    python benchmarks/bench_all.py --list
    python benchmarks/bench_all.py cluster reliability

A result is skipped if neither the package nor the benchmarks have changed since its commit. A
record is written to build/bench first, and to benchmarks/results when it is complete. To resume
after an interruption, run the same command: programs that take hours continue from that file.

Run it on an idle machine. Links between hosts need root, ip and tc. bench_cluster also measures the
author's powersgd if a clone of https://github.com/epfml/powersgd is on PYTHONPATH; the package that
pip installs is empty. Both it and bench_convergence measure torchft, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, UNFINISHED = ROOT / "benchmarks" / "results", ROOT / "build" / "bench"
PICTURES = ROOT / "docs" / "images"
MEASURED = ("csrc", "include", "python", "benchmarks", ":!benchmarks/results")


@dataclass(frozen=True)
class Measurement:
    name: str  # of the record, and of the picture if there is one
    minutes: int  # on two cores
    command: str  # in benchmarks/, without the files
    picture: bool = False

    def is_current(self) -> bool:
        return _measures_this_tree(RESULTS / f"{self.name}.json")

    def run(self) -> bool:
        """Starts or resumes the measurement. Returns whether the result is complete."""
        record, picture = (UNFINISHED / f"{self.name}.{kind}" for kind in ("json", "png"))
        if not _measures_this_tree(record):
            record.unlink(missing_ok=True)
        program, *words = self.command.split()
        words += ["--json", str(record), *(["--picture", str(picture)] if self.picture else [])]
        command = [sys.executable, str(ROOT / "benchmarks" / program), *words]
        print("\n", *command, flush=True)
        if subprocess.run(command, check=False).returncode:
            return False
        record.replace(RESULTS / record.name)
        if self.picture:
            picture.replace(PICTURES / picture.name)
        return True


def _measures_this_tree(record: Path) -> bool:
    """Whether the measured code has not changed since the commit of a record."""
    if not record.exists() or not (commit := json.loads(record.read_text()).get("commit")):
        return False
    changed = ["git", "diff", "--quiet", commit, "--", *MEASURED]
    return subprocess.run(changed, cwd=ROOT, capture_output=True, check=False).returncode == 0


_STAGES = "bench_stages.py --wire float32 --models resnet18"
_DELAYED = (
    "bench_cluster.py --rates 1gbit --delays 0.1 5 20 50 --rounds 4"
    " --methods none plain hook-1-bucket:16 int8-wire:16"
)
_LEARNING = (
    "plain hook-1-bucket:16 int8-wire:16 diloco+wire_dtype=int4:32"
    " diloco+fragment_sync_delay=5:16 torchft+lr=0.8+momentum=0.3:10"
)
_LOCAL = "bench_cluster.py --models demo --ranks 2 --rounds 3 --steps 10 --methods none"
_LOSSES = "bench_convergence.py losses --resume"
_MORE = (
    f"{_LOSSES} --methods plain int8-wire:16 diloco+wire_dtype=int4:32 sparse"
    " torchft+lr=0.8+momentum=0.3:10"
)
PARTS = {
    "stages": [
        Measurement(
            "stages_cpu",
            20,
            f"{_STAGES} demo gpt2 --ranks 1 2 4 8 --dtypes float32 bfloat16 bfloat16/bfloat16",
        ),
        Measurement("stages_by_rank", 5, f"{_STAGES} gpt2 --ranks 4 8 16 32"),
    ],
    "cluster": [
        Measurement(
            "cluster_links",
            60,
            "bench_cluster.py --ranks 2 --rounds 5 --learning-steps 300 --seeds 3"
            " --methods none plain fp16 hook-1-bucket:4,16 attached:4 bf16-wire:16"
            " int8-wire:8,16,32 int4-wire:32"
            " --learning-methods plain hook-1-bucket:16 bf16-wire:16 int8-wire:16,32",
            picture=True,
        ),
        Measurement("cluster_delays", 10, f"{_DELAYED} --models demo --ranks 2"),
        Measurement("cluster_delays_hosts", 10, f"{_DELAYED} --models gpt-1M --ranks 2 4 8"),
        Measurement(
            "cluster_hosts",
            10,
            "bench_cluster.py --models gpt-5M --ranks 8 --per-host 4 --rates 1gbit 100mbit"
            " --rounds 4 --methods none plain hook-1-bucket:16 int8-wire:16"
            " int8-wire+levels=1:16",
        ),
        Measurement(
            "cluster_local_far",
            20,
            f"{_LOCAL} {_LEARNING} local-sgd+fragments=5:16 --rates 100mbit --delays 50"
            f" --learning-steps 200 --learning-methods {_LEARNING}",
        ),
        Measurement(
            "cluster_local_density",
            5,
            f"{_LOCAL} int8-wire:16 diloco+wire_dtype=int4:32 sparse --rates 100mbit --delays 50",
        ),
        Measurement(
            "cluster_local",
            10,
            f"{_LOCAL} {_LEARNING} local-sgd:16 local-sgd+fragments=5:16 --rates 1gbit"
            " --delays 20 50",
        ),
        Measurement(
            "cluster_cpu",
            30,
            "bench_cluster.py --ranks 2 --rounds 7 --learning-steps 80"
            " --methods none plain fp16 hook-1-bucket:4 author:4 attached:4 flat:4 bf16-wire:4",
        ),
    ],
    "reliability": [
        Measurement("faults", 20, "bench_reliability.py faults"),
        Measurement("restarts", 5, "bench_reliability.py restarts"),
    ],
    "scaling": [Measurement("scaling", 5, "bench_scaling.py")],
    "convergence": [
        Measurement("convergence", 360, _LOSSES, picture=True),
        Measurement("local_steps", 65, f"{_LOSSES} --stages local", picture=True),
        Measurement("local_steps_4", 30, f"{_MORE} --ranks 4 --seeds 3 --tasks language lstm"),
        Measurement("local_steps_8", 30, f"{_MORE} --ranks 8 --seeds 3 --tasks language"),
        Measurement("local_steps_long", 55, f"{_LOSSES} --stages local-long --seeds 3"),
        Measurement("local_steps_muon", 50, f"{_LOSSES} --stages local-muon --seeds 5"),
        Measurement("local_steps_unlike", 5, f"{_LOSSES} --stages local-unlike --seeds 3"),
        Measurement("width", 80, f"{_LOSSES} --stages width --seeds 2"),
        Measurement("shadow", 10, "bench_convergence.py shadow"),
        Measurement("unlike_data", 5, "bench_convergence.py unlike-data"),
    ],
}


def listed() -> str:
    """The parts with their hours, and the results still to be measured."""
    lines = []
    for name, part in PARTS.items():
        hours = sum(each.minutes for each in part) / 60
        todo = [each.name for each in part if not each.is_current()]
        lines.append(f"{name:12}{hours:5.1f} hours; to measure: {', '.join(todo) or 'nothing'}")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    some = f"parts to run: {', '.join(PARTS)} (all)"
    parser.add_argument("parts", nargs="*", metavar="PART", help=some)
    parser.add_argument("--list", action="store_true", help="list the parts and measure nothing")
    arguments = parser.parse_args(words)
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    print(listed(), flush=True)
    if arguments.list:
        return
    UNFINISHED.mkdir(parents=True, exist_ok=True)
    chosen = [each for name in arguments.parts or PARTS for each in PARTS[name]]
    failed = [each.name for each in chosen if not each.is_current() and not each.run()]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
