# SPDX-License-Identifier: BSD-3-Clause
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Backend

torch_version: str

class Options:
    matrix_approximation_rank: int
    start_powerSGD_iter: int
    min_compression_rate: float
    use_error_feedback: bool
    warm_start: bool
    orthogonalization_epsilon: float
    random_seed: int
    compression_stats_logging_frequency: int
    scope: str
    min_numel: int
    inner: str
    wire_dtype: str | None
    residual_dtype: str
    alternating: bool
    check_every: int
    def __init__(self) -> None: ...
    def validate(self) -> None: ...

def matrix_shape(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, int]: ...
def effective_rank(rows: int, cols: int, options: Options) -> int: ...
def should_compress(rows: int, cols: int, options: Options) -> bool: ...
def has_kernels(device: str) -> bool: ...

class BucketCompressor:
    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        options: Options,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None: ...
    def project(
        self,
        gradient: torch.Tensor,
        step: int,
        output_scale: float = 1.0,
        grad_scale: float = 1.0,
    ) -> torch.Tensor: ...
    def orthogonalize(self) -> None: ...
    def back_project(self) -> torch.Tensor: ...
    def reconstruct(self) -> None: ...
    def rollback(self) -> None: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def gradient_bytes(self) -> int: ...

class BackendOptions(Backend.Options):
    compression: Options

class BackendPowerSGD(Backend):
    grad_scale: float
    def __init__(
        self,
        rank: int,
        size: int,
        inners: Sequence[tuple[str, Backend, Sequence[Backend]]],
        options: Options,
        log: Callable[[bool, str], None],
    ) -> None: ...
    @property
    def options(self) -> BackendOptions: ...
    def stats(self) -> dict[str, Any]: ...
    def models(self) -> list[AttachedModel]: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...
    def _fail_at(self, stage: str) -> None: ...

class ParameterExport:
    name: str
    residual: torch.Tensor | None
    q: torch.Tensor | None
    def __init__(self) -> None: ...

class LocalExport:
    name: str
    memory: torch.Tensor | None
    p_hat: torch.Tensor
    q_local: torch.Tensor
    q_warm: torch.Tensor
    grad_scale: float
    def __init__(self) -> None: ...

class AttachedModel:
    active: bool
    grad_scale: float
    @property
    def step(self) -> int: ...
    @property
    def options(self) -> Options: ...
    def export_state(self) -> list[ParameterExport]: ...
    def check_state(self, saved: Sequence[ParameterExport]) -> None: ...
    def load_state(
        self, saved: Sequence[ParameterExport], step: int, grad_scale: float
    ) -> None: ...
    def export_local(self) -> list[LocalExport]: ...
    def check_local(self, saved: Sequence[LocalExport]) -> None: ...
    def load_local(self, saved: Sequence[LocalExport], step: int) -> None: ...
    def step_skipped(self, dropped: torch.Tensor | None = None) -> None: ...
    def residual_norms(self) -> dict[str, float]: ...

def attach(
    reducer: Any,
    backend: BackendPowerSGD,
    names: Sequence[str],
    parameters: Sequence[torch.Tensor],
    options: Options,
) -> AttachedModel: ...
def push_override(enabled: bool) -> None: ...
def pop_override() -> None: ...
def shutdown_at_exit() -> None: ...
