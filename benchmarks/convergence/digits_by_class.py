# SPDX-License-Identifier: BSD-3-Clause
"""The digits' classifier where each process learns from pictures of other digits."""

from __future__ import annotations

import argparse

from train_digits import DigitTrainer, options, read_digits
from training import Wrap

__all__ = ["DigitsByClassTrainer", "options"]


class DigitsByClassTrainer(DigitTrainer):
    def __init__(self, args: argparse.Namespace, wrap: Wrap | None = None) -> None:
        super().__init__(args, wrap)
        (pictures, labels), _ = read_digits()
        order = labels.argsort(stable=True).chunk(self.world)[self.rank]
        self.pictures, self.labels = pictures[order], labels[order]
