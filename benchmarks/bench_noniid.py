# SPDX-License-Identifier: BSD-3-Clause
"""Measures the residual, and the result, where the ranks' data differ.

    python benchmarks/bench_noniid.py --json noniid.json --picture noniid.png
    python benchmarks/bench_noniid.py --show noniid.json --picture noniid.png

The job is SGD with noise on the mean over two ranks of |x - c_rank|^2 / 2. The optimum is the mean
of the c, which are far apart. Near it a rank's gradient is almost all disagreement, which no step
can remove. x is float32. The gradients are made, averaged and compressed in float32 or bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cluster.methods import EXACT_STEPS, METHODS, Trainee
from convergence import pictures, ranks
from matplotlib import pyplot
from provenance import heading, processor, provenance
from rich.progress import track
from text_tables import print_tables
from torch import Tensor, nn

CONTENDERS = ("plain", "hook-1-bucket", "attached")
DTYPES = ("float32", "bfloat16")
SHAPE = (16, 40)
LEARNING_RATE = 0.05
APART = 5.0  # standard deviation of c; that of the optimum is 1
NOISE = 0.5
SAMPLE_EVERY = 10
LAST = 10  # samples whose mean is the distance at the end
# Okabe and Ito's colors, which color-blind readers can distinguish.
COLORS = {"plain": "#000000", "hook-1-bucket": "#0072b2", "attached": "#d55e00"}


class Linear(nn.Module):
    """A module whose gradient is the argument of the call."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def residual_norm(trainee: Trainee) -> float | None:
    """The norm of this rank's residual. None means that there is no residual yet."""
    state = getattr(trainee, "hook_state", None)
    if state is not None:
        return max((float(e.float().norm()) for e in state.error_dict.values()), default=None)
    if trainee.compression is None:
        return None
    return max(trainee.compression.stats()["residual_norms"].values(), default=None)


def descend(make: ranks.Make, dtype: str, steps: int) -> dict[str, list[float | None]]:
    """Descends on every rank and returns samples."""
    rank = dist.get_rank()
    common = torch.Generator().manual_seed(0)
    optimum = torch.randn(SHAPE, generator=common)
    center = optimum + APART * torch.randn(SHAPE, generator=common) * (1 if rank == 0 else -1)
    own = torch.Generator().manual_seed(1 + rank)
    model = Linear(getattr(torch, dtype))
    trainee, weight = make(model), model.weight
    x = torch.zeros(SHAPE)
    samples: dict[str, list[float | None]] = {"step": [], "ratio": [], "distance": []}
    for step in range(1, steps + 1):
        gradient = (x - center + NOISE * torch.randn(SHAPE, generator=own)).to(weight.dtype)
        weight.grad = None
        trainee.module(gradient).backward()
        assert weight.grad is not None
        x -= LEARNING_RATE * weight.grad.float()
        if step % SAMPLE_EVERY == 0:
            residual = residual_norm(trainee)
            ratio = None if residual is None else residual / float(gradient.float().norm())
            samples["step"].append(step)
            samples["ratio"].append(None if ratio is None else round(ratio, 4))
            samples["distance"].append(round(float((x - optimum).norm()), 4))
    return samples


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    runs = []
    todo = [(method, dtype) for dtype in DTYPES for method in CONTENDERS]
    for method, dtype in track(todo, "descending"):
        samples = ranks.run(descend, method, arguments.rank, 0, dtype, arguments.steps)
        runs.append({"method": method, "dtype": dtype, **samples})
    return {
        **provenance(processor()),
        "shape": SHAPE,
        "rank": arguments.rank,
        "steps": arguments.steps,
        "exact_steps": EXACT_STEPS,
        "runs": runs,
    }


def show(record: dict[str, Any]) -> None:
    console = heading(record, f"{record['steps']} steps", f"rank {record['rank']}")
    headings = ["", "gradients", "|e| / |g|, largest", "at the end", "distance at the end"]
    rows = []
    for run in record["runs"]:
        ratios = [ratio for ratio in run["ratio"] if ratio is not None]
        shown = [f"{max(ratios):.2f}", f"{ratios[-1]:.2f}"] if ratios else ["-", "-"]
        end = f"{statistics.mean(run['distance'][-LAST:]):.3f}"
        rows.append([METHODS[run["method"]].title, run["dtype"], *shown, end])
    print_tables(console, {"unlike data on two ranks": (headings, rows)})


def draw(record: dict[str, Any], path: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for run in record["runs"]:
        style = {
            "color": COLORS[run["method"]],
            "linestyle": "-" if run["dtype"] == "float32" else "--",
            "label": f"{METHODS[run['method']].title}, {run['dtype']}",
        }
        for axes, name in zip(panels, ("ratio", "distance"), strict=True):
            points = [p for p in zip(run["step"], run[name], strict=True) if p[1] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), **style)
    panels[0].set(ylabel="|residual| / |gradient|")
    panels[1].set(ylabel="|x - optimum|")
    panels[1].legend(frameon=False, fontsize=8)
    for axes in panels:
        axes.set_xlabel("step")
        pictures.log_scale(axes)
    pictures.finish(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="number of steps (2000)")
    add("--rank", type=int, default=2, help="rank of the approximation (2)")
    add("--quick", action="store_true", help="100 steps in place of --steps")
    add("--json", type=Path, help="file for the results")
    add("--picture", type=Path, help="file for the picture")
    add("--show", type=Path, metavar="JSON", help="results to show; nothing is measured")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps = 100
    record = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(record) + "\n")
    show(record)
    if arguments.picture:
        draw(record, arguments.picture)


if __name__ == "__main__":
    main()
