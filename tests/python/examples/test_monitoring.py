# SPDX-License-Identifier: BSD-3-Clause
"""The examples for monitoring tools report what the handle counts; the dashboard shows it."""

from __future__ import annotations

import itertools
import json
import os
import re
import runpy
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support import launch
from support.repository import ROOT
from support.torchrun import warnings_in

EXAMPLES = ROOT / "examples"
STEPS = 20  # of the Prometheus example, which would run for minutes
MATRIX = 1024 * 1024 * 4  # bytes of its gradient
COLUMNS = 24  # of a dashboard of Grafana


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the two processes of the Prometheus example expose after their last step."""
    pytest.importorskip("prometheus_client")
    outputs = launch.run(2, _scrape, folder=tmp_path_factory.mktemp("prometheus"))
    assert not any(warnings_in(output.stderr) for output in outputs)
    return [output.stdout for output in outputs]


def _scrape() -> None:
    import prometheus_client

    started = []
    start = prometheus_client.start_http_server

    def start_on_a_free_port(port: int) -> None:
        started.append((port, start(0, addr="127.0.0.1")[0].server_port))

    prometheus_client.start_http_server = start_on_a_free_port
    source = (EXAMPLES / "with_prometheus.py").read_text()
    exec(source.replace("10_000", str(STEPS)), {})
    ((port, free_port),) = started
    assert port == 8000 + int(os.environ["RANK"])
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics") as response:
        print(response.read().decode())


def _log_offline() -> None:
    """Runs the W&B example, and prints the last values of the run before it ends."""
    import wandb

    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_ERROR_REPORTING="false")
    finish = wandb.Run.finish

    def print_and_finish(run: wandb.Run) -> None:
        run.log({}, commit=True)  # what was logged at the last step
        print(json.dumps(dict(run.summary)))
        finish(run)

    wandb.Run.finish = print_and_finish
    runpy.run_path(str(EXAMPLES / "with_wandb.py"))


def test_wandb_has_the_statistics_of_each_layer(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    first, second = launch.run(2, _log_offline, folder=tmp_path)
    assert not warnings_in(first.stderr + second.stderr)
    assert not second.stdout  # only the first process logs
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))

    logged = {
        name.removeprefix("powersgd/"): value for name, value in json.loads(first.stdout).items()
    }
    assert logged["_step"] == logged["steps"] == 100
    assert logged["skipped_steps"] == 0
    assert logged["ratio"] == logged["bytes_before"] / logged["bytes_after"]
    assert logged["compressed_ratio"] > 40
    assert 0 < logged["residual_norms/0.weight"] == logged["layers/0.weight/residual"]
    assert logged["loss"] > 0


def test_prometheus_sees_the_statistics_of_each_process(scrapes: list[str]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    for scrape in scrapes:
        families = {each.name: each for each in text_string_to_metric_families(scrape)}
        samples = [sample for each in families.values() for sample in each.samples]
        values = {(each.name, each.labels.get("name")): each.value for each in samples}

        assert values["powersgd_steps_total", None] == STEPS
        assert values["powersgd_skipped_steps_total", None] == 0
        before, after = (
            values[f"powersgd_bytes_{when}_total", None] for when in ("before", "after")
        )
        assert before > STEPS * MATRIX
        assert values["powersgd_ratio", None] == before / after
        assert values["powersgd_compressed_ratio", None] > 20
        assert values["powersgd_seconds_total", "project"] > 0
        assert 0 < values["powersgd_layer_captured", "weight"] < 1
        residual = values["powersgd_layer_residual", "weight"]
        assert 0 < residual == values["powersgd_residual_norms", "weight"]
        # What may fall is a gauge: rate() would take a fall for a restart.
        kinds = {name: each.type for name, each in families.items() if "powersgd" in name}
        assert kinds["powersgd_bytes_after"] == kinds["powersgd_seconds"] == "counter"
        assert kinds["powersgd_ratio"] == kinds["powersgd_layer_residual_ratio"] == "gauge"
    own = [re.findall(r"powersgd_residual_norms.*", scrape) for scrape in scrapes]
    assert own[0] != own[1]


def test_the_page_shows_what_prometheus_sees(scrapes: list[str]) -> None:
    page = (ROOT / "docs" / "checks.md").read_text()
    shown = {*re.findall(r"^powersgd_.*", page, re.MULTILINE)}
    assert shown
    assert shown <= {*scrapes[0].splitlines()}


def test_the_dashboard_asks_for_what_is_exported(scrapes: list[str]) -> None:
    exported = {*re.findall(r"^powersgd_\w+", scrapes[0], re.MULTILINE)}
    asked = {*re.findall(r"powersgd_\w+", json.dumps(_dashboard()))}
    assert len(asked) > len(_dashboard()["panels"])
    assert asked <= exported


def test_the_dashboard_has_what_grafana_requires() -> None:
    dashboard = _dashboard()
    assert dashboard["title"]
    assert dashboard["uid"]
    assert dashboard["schemaVersion"] > 0
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    used = {*re.findall(r"\$\{?([a-z]\w*)", json.dumps(dashboard))}
    assert used == variables

    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] == "timeseries"
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= COLUMNS
        targets = panel["targets"]
        assert len({target["refId"] for target in targets}) == len(targets) > 0
        for target in targets:
            assert target["expr"].count("(") == target["expr"].count(")")
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        assert _apart(one, other, "x", "w") or _apart(one, other, "y", "h")


def _dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())
    return read


def _apart(one: dict[str, int], other: dict[str, int], begin: str, size: str) -> bool:
    first, last = sorted((one, other), key=lambda place: place[begin])
    return first[begin] + first[size] <= last[begin]
