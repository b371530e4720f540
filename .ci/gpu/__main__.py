# SPDX-License-Identifier: BSD-3-Clause
"""Builds, tests and measures on a machine with an NVIDIA GPU, in two calls of 8 and 4 minutes.

    python3 .ci/gpu                    all tests, and what decides most
    python3 .ci/gpu second             what failed or had no time in the first call, and records
    python3 .ci/gpu --parts smoke      repeats these parts of the call

This Python runs the parts. It needs torch with CUDA, setuptools >= 77, ninja, numpy and pytest. If
a part fails, hangs or lacks something, the others still run. RESULTS has the verdicts in
summary.txt, and the logs and all JSON in results.tar.gz. CONTRIBUTING.md says how to save time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import parts
from call import NOT_RUN, OK, OUTPUT, Call

QUERY = "nvidia-smi --format=csv,noheader --query-gpu"
SECONDS = {"first": 480, "second": 240}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python3 .ci/gpu", description="See CONTRIBUTING.md.")
    parser.add_argument("call", nargs="?", default="first", choices=SECONDS)
    parser.add_argument("--parts", nargs="+", metavar="PART", help="parts of the call to run (all)")
    parser.add_argument("--prebuilt", action="store_true", help="don't build the extension")
    parser.add_argument("--seconds", type=int, help="limit of the call (480; second call: 240)")
    return parser.parse_args()


def _said_by(words: str) -> str:
    """The first line of a program's output; nothing if there is no such program."""
    said = subprocess.run(f"{words} 2>/dev/null", shell=True, capture_output=True, text=True)
    return said.stdout.partition("\n")[0]


def prepare_environment() -> None:
    """Sets what all commands read. pip installs ninja next to python."""
    python = os.environ.get("PYTHON") or sys.executable
    commit = os.environ.get("POWERSGD_COMMIT") or _said_by("git rev-parse --short HEAD")
    folders = [os.environ["PATH"], "/usr/local/cuda/bin", str(Path(python).parent)]
    modules = [str(Path("python").resolve()), os.environ.get("PYTHONPATH")]
    os.environ.update(
        ARCHITECTURE=_said_by(f"{QUERY}=compute_cap").replace(".", ""),
        POWERSGD_COMMIT=commit or "unknown",
        OUTPUT=str(OUTPUT),
        PYTHON=python,
        PYTHONUNBUFFERED="1",
        PYTHONPATH=os.pathsep.join(filter(None, modules)),
        PATH=os.pathsep.join(folders),
    )


def main() -> int:
    arguments = parse_arguments()
    gpu = _said_by(f"{QUERY}=name,driver_version")
    if not gpu:
        sys.exit("nvidia-smi finds no GPU")
    first = arguments.call == "first"
    results = Path(os.environ.get("RESULTS") or "build/gpu/results")
    if first and not arguments.parts:
        shutil.rmtree(OUTPUT, ignore_errors=True)
    for folder in (results, OUTPUT / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    prepare_environment()
    verdicts = OUTPUT / "verdicts.json"
    earlier = json.loads(verdicts.read_text()) if verdicts.exists() else {}
    every = parts.first_call() if first else parts.second_call(earlier)
    names = [part.name for part in every]
    if unknown := set(arguments.parts or []) - set(names):
        sys.exit(f"no part {', '.join(sorted(unknown))} in this call: {', '.join(names)}")
    wanted = [part for part in every if part.name in (arguments.parts or names)]
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    title = f"{arguments.call} call, commit {os.environ['POWERSGD_COMMIT']}, {gpu}, {today}"
    call = Call(title, results, arguments.seconds or SECONDS[arguments.call], earlier)
    for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(kind, lambda *_: sys.exit(130))
    call.run(parts.builds(arguments.prebuilt), wanted)
    print(f"\n{call.summary()}results in {results}")
    return int(any(v != OK and not v.startswith(NOT_RUN) for v in call.verdicts.values()))


if __name__ == "__main__":
    os.chdir(Path(__file__).resolve().parents[2])
    sys.exit(main())
