# SPDX-License-Identifier: BSD-3-Clause
"""The stand-ins that let torchtitan 0.3.0 run on a CPU. Import this before torchtitan.

torchtitan asks torch for an accelerator. These functions of torch answer for the CPU, and nothing
of torchtitan is changed. ``on_cpu`` takes parts out of a config that work on GPUs only, and puts a
text and a tokenizer in that need no files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

ANSWERS: dict[str, Callable[..., Any]] = {
    "current_device": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_name": lambda device=None: "CPU",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**30),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": lambda: None,
}
for name, answer in ANSWERS.items():
    setattr(torch.cpu, name, answer)
torch._utils._get_available_device_type = lambda: "cpu"


def set_timeout(timeout: Any, group: Any = None) -> None:
    """torch 2.13 lacks it, on GPUs as well."""
    group = dist.group.WORLD if group is None else group
    group.set_timeout(timeout)


if not hasattr(dist, "set_timeout"):
    setattr(dist, "set_timeout", set_timeout)  # noqa: B010

from char_gpt import VOCABULARY, read_text, sample  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Characters(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("ascii", errors="replace"))

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode("ascii")

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Windows(BaseDataLoader):  # type: ignore[misc]
    """Random windows of a text, other ones on each process."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.text = read_text(1_000_000)
        self.generator = torch.Generator().manual_seed(dp_rank)
        self.batch, self.context = local_batch_size, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        positions = torch.arange(self.context).expand(self.batch, -1)
        while True:
            inputs, targets = sample(self.text, self.batch, self.context, self.generator)
            yield {"input": inputs, "positions": positions}, targets

    def state_dict(self) -> dict[str, Any]:
        return {}  # torchtitan's own data loaders save their place in the text

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def on_cpu(config: Trainer.Config) -> Trainer.Config:
    """Returns the config of a small training that runs on CPUs."""
    config.tokenizer, config.dataloader = Characters.Config(), Windows.Config()
    config.training.local_batch_size, config.training.seq_len = 2, 64
    # These need a GPU.
    config.training.disable_cuda_graphs = True
    for layer in config.model_spec.model.layers:  # FlexAttention goes backward on GPUs only
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    # The default, spmd_types, needs a torch that is newer than 2.13.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.metrics.disable_color_printing = True
    config.debug.seed = 0
    return config
