# SPDX-License-Identifier: BSD-3-Clause
"""Exports statistics to Prometheus: torchrun --nproc-per-node 2 examples/with_prometheus.py."""

import torch
import torch.distributed as dist
from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from torch import nn

import torch_powersgd

GAUGES = {"compressing", "starts_at", "ratio", "compressed_ratio", "residual_norms", "layers"}
scalars: dict[str, float] = {}  # of the last step: a scrape may come in the middle of one


class Exporter:
    def collect(self) -> list[Metric]:
        metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for path, value in scalars.items():  # ratio, seconds/project, layers/weight/captured
            head, *label = path.split("/")
            name = f"powersgd_layer_{label.pop()}" if head == "layers" else f"powersgd_{head}"
            family = GaugeMetricFamily if head in GAUGES else CounterMetricFamily
            metrics.setdefault(name, family(name, head, labels=["name"])).add_metric(label, value)
        return list(metrics.values())


dist.init_process_group("cpu:powersgd")  # on GPUs: "cpu:gloo,cuda:powersgd"
torch.manual_seed(dist.get_rank())  # each process draws its own data
ddp = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024))
compression = torch_powersgd.attach(ddp)
optimizer = torch.optim.AdamW(ddp.parameters())
REGISTRY.register(Exporter())
start_http_server(8000 + dist.get_rank())  # each process has its own residuals
for _ in range(10_000):
    inputs = torch.randn(32, 1024)
    optimizer.zero_grad()
    nn.functional.mse_loss(ddp(inputs), inputs.roll(1, dims=1)).backward()
    optimizer.step()
    scalars = compression.stats(flat=True, per_layer=True)
dist.destroy_process_group()
