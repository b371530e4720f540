# SPDX-License-Identifier: BSD-3-Clause
"""Trains a model twice on two local processes, with plain Gloo and with torch_powersgd.

It compares the losses and the bytes sent. The demo takes 2.5 minutes on two cores.

Both runs have the same hyper-parameters, initial weights and batches. Compression has its
default options: matrix rank 16 and factors sent in int8, after 10 exact steps.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")  # a file is written: no display is needed
from matplotlib import pyplot, ticker

OUTPUT = Path("demo_output")
PROCESSES = 2


@dataclass(frozen=True)
class Run:
    name: str
    color: str
    records: list[dict[str, Any]]  # one per step, as train_lm.py wrote them

    @property
    def last(self) -> dict[str, Any]:
        return self.records[-1]

    @property
    def bytes_sent(self) -> int:
        return int(self.last["bytes_sent"])

    @property
    def bytes_of_last_step(self) -> int:
        return int(self.bytes_sent - self.records[-2]["bytes_sent"])

    @property
    def milliseconds(self) -> float:
        return statistics.median(float(record["ms"]) for record in self.records)

    @property
    def final_loss(self) -> float:
        """The mean over the last steps, since a single batch says little."""
        return statistics.mean(float(record["loss"]) for record in self.records[-20:])


def train(name: str, color: str, *arguments: str) -> Run:
    metrics = OUTPUT / f"{name.replace(', ', '-').replace(' ', '-')}.jsonl"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    script = str(Path(__file__).with_name("train_lm.py"))
    subprocess.run(
        [sys.executable, *launcher, script, "--metrics", str(metrics), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the processes share the cores
        check=True,
    )
    return Run(name, color, [json.loads(line) for line in metrics.read_text().splitlines()])


def table(plain: Run, runs: list[Run]) -> Table:
    def change(run: Run) -> str:
        ratio = run.last["validation_loss"] / plain.last["validation_loss"]
        return f"{ratio - 1:+.1%}" if run is not plain else ""

    def fewer(size: Callable[[Run], int]) -> Callable[[Run], str]:
        return lambda run: f"{size(plain) / size(run):.1f}" if run is not plain else ""

    rows: dict[str, Callable[[Run], str]] = {
        "training loss, last 20 steps": lambda run: f"{run.final_loss:.3f}",
        "validation loss": lambda run: f"{run.last['validation_loss']:.3f}",
        "  against plain": change,
        "gradients sent in the last step, MB": lambda run: f"{run.bytes_of_last_step / 1e6:.2f}",
        "  times fewer": fewer(lambda run: run.bytes_of_last_step),
        "gradients sent in all steps, MB": lambda run: f"{run.bytes_sent / 1e6:.0f}",
        "  times fewer, exact steps included": fewer(lambda run: run.bytes_sent),
        "milliseconds per step, median": lambda run: f"{run.milliseconds:.0f}",
        "steps skipped": lambda run: str(run.last["skipped"]),
    }
    result = Table(title=f"{len(plain.records)} steps on {PROCESSES} processes of one machine")
    result.add_column("")
    for run in runs:
        result.add_column(run.name, justify="right")
    for name, cell in rows.items():
        result.add_row(name, *(cell(run) for run in runs))
    return result


def draw(runs: list[Run], path: Path) -> None:
    figure, (by_step, by_bytes) = pyplot.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for run in runs:
        validated = [r for r in run.records if r["validation_loss"] is not None]
        validation = [record["validation_loss"] for record in validated]
        style = {"color": run.color, "marker": "o", "label": run.name}
        losses = [record["loss"] for record in run.records]
        steps = [record["step"] for record in run.records]
        by_step.plot(steps, losses, color=run.color, alpha=0.25, linewidth=0.8)
        by_step.plot([record["step"] for record in validated], validation, **style)
        by_bytes.plot([r["bytes_sent"] / 1e6 for r in validated], validation, **style)
    by_step.set(xlabel="training step", ylabel="loss (nats per character)", ylim=(1.75, 3.75))
    by_step.legend(title="validation (thin lines: training)", frameon=False)
    by_bytes.set(xlabel="gradients that each process has sent, MB", xscale="log")
    by_bytes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    by_bytes.xaxis.set_major_formatter("{x:,.0f}")
    by_bytes.xaxis.set_minor_formatter(ticker.NullFormatter())
    for axes in (by_step, by_bytes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    OUTPUT.mkdir(exist_ok=True)
    plain = train("plain Gloo", "#0072b2", "--backend", "gloo")
    compressed = train("powersgd, rank 16, int8", "#d55e00", "--backend", "powersgd")
    runs = [plain, compressed]
    picture = OUTPUT / "loss.png"
    draw(runs, picture)
    console = Console()
    console.print(table(plain, runs))
    console.print(f"The curves: {picture}")


if __name__ == "__main__":
    main()
