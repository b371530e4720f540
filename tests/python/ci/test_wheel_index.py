# SPDX-License-Identifier: BSD-3-Clause
"""The lines of docs/install.md install what fits from the indexes of .ci/wheel_index.py."""

import re
import subprocess
import sysconfig
import venv
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from programs import load

from support.repository import ROOT

PIP = Path(sysconfig.get_path("purelib"), "pip")  # its import would break that of setuptools
PAGE = (ROOT / "docs" / "install.md").read_text()
BY_TORCH, BY_HAND, UPGRADE = re.findall(r"```sh\n([^`]*--index-url[^`]*)\n```", PAGE)
TAG = str(next(sys_tags()))
ON_ARM = "--platform linux_aarch64 --only-binary :all: --no-deps --target ."
OLD = f"pip install --no-deps ../../../../torch_powersgd-0.1.0+torch2.12.1.cpu-{TAG}.whl"


def link_to_new_wheel(folder: Path, torch: str, device: str, tag: str) -> str:
    version = f"0.1.0+torch{torch}.{device}"
    core = f"Name: torch-powersgd\nVersion: {version}\nRequires-Dist: torch=={torch}\n"
    wheel = folder / f"torch_powersgd-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file, text in {"METADATA": core, "WHEEL": f"Tag: {tag}\n", "RECORD": ""}.items():
            head = "Wheel-Version: 1.0\n" * (file == "WHEEL")
            archive.writestr(f"torch_powersgd-{version}.dist-info/{file}", head + text)
    return f"{wheel.as_uri()}#sha256={sha256(wheel.read_bytes()).hexdigest()}"


@pytest.mark.parametrize(
    ("command", "torch", "expected"),
    [
        (BY_TORCH, "2.13.0+cu130", {"2.13.0.cu130"}),
        (f"{BY_TORCH} {ON_ARM}", "2.13.0+cu130", {"2.13.0.cpu"}),
        (f"{OLD}\n{UPGRADE}", "2.13.0+cpu", {"2.13.0.cpu"}),
        (BY_HAND, "2.12.1+cpu", set()),
    ],
)
def test_pip_takes_what_fits(tmp_path: Path, command: str, torch: str, expected: set[str]) -> None:
    devices = [("cpu", TAG), ("cu130", TAG), ("cpu", f"{TAG.rpartition('-')[0]}-linux_aarch64")]
    wheels = [(version, *device) for version in ("2.12.1", "2.13.0") for device in devices]
    links = [link_to_new_wheel(tmp_path, *wheel) for wheel in wheels]
    load("wheel_index").make_indexes(tmp_path / "whl", links)
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    (packages / "pip").symlink_to(PIP)
    (packages / "torch.py").write_text(f"__version__ = '{torch}'")
    (packages / f"torch-{torch}.dist-info").mkdir()
    (packages / f"torch-{torch}.dist-info/METADATA").write_text(f"Name: torch\nVersion: {torch}\n")
    here = re.sub(r"https://\S+/whl/", f"{tmp_path.as_uri()}/whl/", command)
    shell = ["sh", "-c", f'pip() {{ python -m pip "$@"; }}; {here}']
    environment = {"PATH": f"{tmp_path}/env/bin:/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null"}
    ended = subprocess.run(shell, cwd=packages, env=environment, capture_output=True, text=True)
    ours = {info.stem for info in packages.glob("torch_powersgd-*.dist-info")}
    assert ours == {f"torch_powersgd-0.1.0+torch{each}" for each in expected}, ended.stderr
    assert ours or "No matching distribution found for torch==2.13.0" in ended.stderr
