# SPDX-License-Identifier: BSD-3-Clause
"""An LSTM on the text of examples/train_lm.py, whose weights are shared by all time steps."""

from __future__ import annotations

import argparse

from char_gpt import VOCABULARY
from torch import Tensor, nn
from torch.nn import functional as F
from train_lm import LanguageTrainer, options

__all__ = ["RecurrentTrainer", "options"]


class CharLSTM(nn.Module):
    """An embedding of half the width, an LSTM and a linear layer. forward() returns the loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width // 2)
        self.recurrent = nn.LSTM(width // 2, width, layers, batch_first=True)
        self.predict = nn.Linear(width, VOCABULARY)

    def forward(self, characters: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy, in nats per character."""
        states, _ = self.recurrent(self.token(characters))
        return F.cross_entropy(self.predict(states).flatten(0, 1), targets.flatten())


class RecurrentTrainer(LanguageTrainer):
    @staticmethod
    def make_model(args: argparse.Namespace) -> nn.Module:
        return CharLSTM(args.layers, args.width)
