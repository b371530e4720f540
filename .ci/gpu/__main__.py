# SPDX-License-Identifier: BSD-3-Clause
"""Builds, tests and measures on a machine with an NVIDIA GPU, in two calls of 8 and 4 minutes.

    python3 .ci/gpu                        smoke test, all tests, and times of the stages
    python3 .ci/gpu second                 what failed in the first call, and longer benchmarks
    python3 .ci/gpu --parts smoke kernels  repeats these parts of the first call

This Python runs the parts. It needs torch with CUDA, setuptools >= 77, ninja, numpy and pytest.
Nothing is downloaded. To save build time, bring build/gpu-programs, made by `make gpu-programs` on
another machine. If a part fails, hangs or lacks something, the others still run. Two files in
RESULTS are updated every 10 seconds: summary.txt says what passed and what failed, and has the
ratios; results.tar.gz has the logs and the JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import parts
from call import Call, earlier_verdicts
from commands import BUILD, LOGS, OUTPUT, PYTHON, builds
from runner import Part, Runner, Verdict

SECONDS = {"first": 480, "second": 240}


def parse_arguments() -> argparse.Namespace:
    text = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python3 .ci/gpu", description=__doc__, formatter_class=text)
    add = parser.add_argument
    results = os.environ.get("RESULTS") or BUILD / "results"
    cores = len(os.sched_getaffinity(0))
    add("call", nargs="?", default="first", choices=SECONDS)
    add("--parts", nargs="+", metavar="PART", help="parts of the call to run (all)")
    add("--results", type=Path, default=results, help=f"folder for the results ({results})")
    add("--jobs", type=int, default=cores, help="parallel compilers per build (one per core)")
    add("--seconds", type=int, help="time limit of the call, in seconds (480; second call: 240)")
    add("--longest", type=int, default=10**6, help="limit of any part, in seconds")
    arguments = parser.parse_args()
    arguments.seconds = arguments.seconds or SECONDS[arguments.call]
    return arguments


def query(what: str) -> str:
    words = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return ""
    return ended.stdout.split("\n")[0].strip()


def commit() -> str:
    """The commit: POWERSGD_COMMIT, or git's, or that of the programs built elsewhere."""
    if named := os.environ.get("POWERSGD_COMMIT"):
        return named
    if shutil.which("git"):
        words = ["git", "rev-parse", "--short", "HEAD"]
        found = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        if found:
            return found.strip()
    stamp = Path("build/gpu-programs/made_from")
    return stamp.read_text().split()[-1] if stamp.exists() else "unknown"


def versions() -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for name in ("torch", "setuptools", "ninja", "numpy", "pytest"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def prepare_environment(jobs: int) -> None:
    """Sets the environment of all commands. pip installs ninja next to python."""
    folders = [os.environ["PATH"], "/usr/local/cuda/bin", str(Path(PYTHON).parent)]
    modules = [str(Path("python").resolve()), os.environ.get("PYTHONPATH")]
    os.environ.update(
        POWERSGD_COMMIT=commit(),
        JOBS=str(jobs),
        MAX_JOBS=str(jobs),
        PYTHONUNBUFFERED="1",
        PYTHONPATH=os.pathsep.join(filter(None, modules)),
        PATH=os.pathsep.join(folders),
    )


def wanted_parts(arguments: argparse.Namespace, earlier: Mapping[str, Verdict]) -> list[Part]:
    every = parts.first_call() if arguments.call == "first" else parts.second_call(earlier)
    names = [part.name for part in every]
    wanted = arguments.parts or names
    if unknown := set(wanted) - set(names):
        sys.exit(
            f"no part {', '.join(sorted(unknown))} in this call; its parts: {', '.join(names)}"
        )
    return [part for part in every if part.name in wanted]


def main() -> int:
    arguments = parse_arguments()
    os.chdir(Path(__file__).resolve().parents[2])
    is_new = arguments.call == "first" and not arguments.parts
    earlier = {} if is_new else earlier_verdicts()
    pending = wanted_parts(arguments, earlier)
    architecture = query("compute_cap").replace(".", "")
    if not architecture.isdigit():
        sys.exit("nvidia-smi finds no GPU")
    if is_new:
        shutil.rmtree(OUTPUT, ignore_errors=True)
    for folder in (arguments.results, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    prepare_environment(arguments.jobs)
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    gpu = query("name,driver_version,memory.total")
    (OUTPUT / "machine.txt").write_text(f"{today}\n{gpu}\n{versions()}\n")

    runner = Runner(LOGS, arguments.seconds, arguments.longest)

    def stop(*_: object) -> None:
        runner.end()
        sys.exit(130)

    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, stop)
    title = f"{arguments.call} call, commit {os.environ['POWERSGD_COMMIT']}, {gpu}, {today}"
    call = Call(title, arguments.results, runner, earlier)
    call.run(builds(architecture), pending)
    print(f"\n{(arguments.results / 'summary.txt').read_text()}\nresults in {arguments.results}")
    return int(call.failed)


if __name__ == "__main__":
    sys.exit(main())
