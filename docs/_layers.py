# SPDX-License-Identifier: BSD-3-Clause
"""Draws docs/images/layers.png from the events of examples/with_tensorboard.py.

torchrun --nproc-per-node 2 examples/with_tensorboard.py --folder FOLDER
python docs/_layers.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PICTURE = Path(__file__).with_name("images") / "layers.png"
SHOWN = {
    "captured": "sent share of gradient + residual",
    "residual_ratio": "residual / averaged gradient",
}


def main(folder: str) -> None:
    events = EventAccumulator(folder).Reload()
    figure, all_axes = plt.subplots(1, len(SHOWN), figsize=(9, 3.2), layout="constrained")
    for axes, (entry, label) in zip(all_axes, SHOWN.items(), strict=True):
        for tag in sorted(events.Tags()["scalars"]):
            _, _, name = tag.partition("layers/")
            parameter, _, kind = name.rpartition("/")
            if kind == entry:
                scalars = events.Scalars(tag)
                steps, values = [s.step for s in scalars], [s.value for s in scalars]
                axes.plot(steps, values, label=parameter)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    all_axes[0].legend(fontsize="small")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
