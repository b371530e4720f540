# SPDX-License-Identifier: BSD-3-Clause
"""The files of examples/cluster: schedulers take them, and the nodes find each other."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from support.deadline import DEADLOCK
from support.repository import ROOT
from torch_powersgd.cli.doctor import STORE_PORT

CLUSTER = ROOT / "examples" / "cluster"
HOSTNAMES = "#!/bin/bash\nprintf 'node7\\nnode8\\n'\n"
# A srun that starts its command once for each node, and a torchrun that shows its arguments.
SRUN = '#!/bin/bash\nfor SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done\n'
TORCHRUN = "#!/bin/bash\necho torchrun $GLOO_SOCKET_IFNAME $*\n"

# The fields that a kind must have, with those of its parts; * stands for each element of a list.
REQUIRED: dict[str, tuple[str, list[str]]] = {
    "Service": ("v1", ["metadata.name", "spec.clusterIP", "spec.selector"]),
    "Job": (
        "batch/v1",
        [
            "metadata.name",
            "spec.completions",
            "spec.parallelism",
            "spec.template.spec.restartPolicy",
            "spec.template.spec.containers.*.name",
            "spec.template.spec.containers.*.image",
            "spec.template.spec.containers.*.command",
        ],
    ),
    "PyTorchJob": (
        "kubeflow.org/v1",
        [
            f"spec.pytorchReplicaSpecs.{role}.{field}"
            for role in ("Master", "Worker")
            for field in ("replicas", "restartPolicy", "template.spec.containers.*.image")
        ],
    ),
}


def _manifests(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def _values(value: Any, path: str) -> list[Any]:
    """The values at a path of fields. A field that lacks is an error."""
    field, _, rest = path.partition(".")
    children = value if field == "*" else [value[field]]
    return [each for child in children for each in (_values(child, rest) if rest else [child])]


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml"])
def test_a_manifest_has_what_its_kind_needs(name: str) -> None:
    for manifest in _manifests(name):
        version, paths = REQUIRED[manifest["kind"]]
        assert manifest["apiVersion"] == version
        for path in paths:
            assert all(_values(manifest, path)), path


def _torchrun(words: list[str]) -> argparse.Namespace:
    """What torchrun makes of its arguments."""
    arguments: argparse.Namespace = get_args_parser().parse_args(words)
    assert arguments.training_script == "train.py"
    assert arguments.rdzv_backend == "static", "so that the store has one fixed port"
    return arguments


def test_the_pods_of_the_job_meet() -> None:
    service, job = _manifests("job.yaml")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None", "a headless Service"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed"
    assert container["command"][0] == "torchrun"
    for index in range(spec["completions"]):
        words = [w.replace("$(JOB_COMPLETION_INDEX)", str(index)) for w in container["command"]]
        arguments = _torchrun(words[1:])
        assert int(arguments.nnodes) == spec["completions"] == spec["parallelism"]
        assert arguments.node_rank == index
        assert arguments.master_addr == f"{name}-0.{pod['subdomain']}"
        assert arguments.master_port == STORE_PORT


@pytest.mark.parametrize("name", ["job.yaml", "pytorchjob.yaml"])
def test_the_pods_of_a_manifest_have_a_range_of_ports(name: str) -> None:
    spec = _manifests(name)[-1]["spec"]
    for pod in spec.get("pytorchReplicaSpecs", {"Job": spec}).values():
        ((sysctl,),) = _values(pod, "template.spec.securityContext.sysctls")
        assert sysctl == {"name": "net.ipv4.ip_local_port_range", "value": "29600 31599"}


def _submit(folder: Path) -> list[str]:
    """Runs the batch script with stand-ins of Slurm's commands. Returns its lines."""
    for name, text in {"scontrol": HOSTNAMES, "srun": SRUN, "torchrun": TORCHRUN}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4207", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[7-8]"}
    environment = os.environ | slurm | {"PATH": f"{folder}:{os.environ['PATH']}"}
    script = ["bash", str(CLUSTER / "train.sbatch")]
    ended = subprocess.run(
        script, env=environment, capture_output=True, text=True, timeout=DEADLOCK
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    return ended.stdout.splitlines()


def test_the_nodes_of_slurm_meet(tmp_path: Path) -> None:
    lines = _submit(tmp_path)
    assert len(lines) == 2
    for index, line in enumerate(lines):
        _, interface, *words = line.split()
        assert interface == "eth0"
        arguments = _torchrun(words)
        assert (arguments.nnodes, arguments.nproc_per_node) == ("2", "1")
        assert arguments.node_rank == index
        assert (arguments.master_addr, arguments.master_port) == ("node7", 29507)
