# SPDX-License-Identifier: BSD-3-Clause
"""pip installs the wheel that fits from the indexes of .ci/wheel_index.py, and keeps torch.

pip is the real one. The wheels are empty, and come from a server on this host.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sysconfig
import threading
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.tags import sys_tags
from programs import load

from support.deadline import DEADLOCK
from support.repository import ROOT

PIP = Path(sysconfig.get_path("purelib"), "pip")  # its import would break that of setuptools
pytestmark = pytest.mark.skipif(not PIP.exists(), reason="needs pip")
wheel_index = load("wheel_index")

SITE = "https://torch-powersgd.github.io/torch-powersgd"
PAGE = (ROOT / "docs" / "install.md").read_text()
BY_TORCH, BY_HAND, AFTER_UPGRADE = re.findall(r"```sh\n([^`]*--index-url[^`]*)```", PAGE)

OWN_TAG = str(next(sys_tags()))
PYTHON, _, PLATFORM = OWN_TAG.split("-")
FOREIGN_TAGS = [
    "cp39-cp39-linux_x86_64",
    "cp399-cp399-linux_x86_64",
    f"{PYTHON}-{PYTHON}-linux_riscv64",
    f"{PYTHON}-{PYTHON}-{re.sub('[0-9]+_[0-9]+', '2_99', PLATFORM)}",
]
ARM = "linux_aarch64"
TORCHES = ["2.12.1", "2.13.0"]


def make_wheel(folder: Path, name: str, version: str, tag: str, **files: str) -> Path:
    """A wheel with some modules. The keyword `requires` is no module, but a requirement."""
    info = f"{name}-{version}.dist-info"
    requires = f"Requires-Dist: {files.pop('requires')}\n" if "requires" in files else ""
    contents = {
        **{f"{module}.py": text for module, text in files.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(path, text)
    return wheel


def make_ours(folder: Path, torch: str, device: str, tag: str = OWN_TAG) -> Path:
    version = f"0.1.0+torch{torch}.{device}"
    return make_wheel(folder, "torch_powersgd", version, tag, requires=f"torch=={torch}")


def make_torch(folder: Path, version: str) -> Path:
    """A torch, which the main index lists without the device for which it is built by default."""
    listed = version.removesuffix("+cu130")
    return make_wheel(folder, "torch", listed, OWN_TAG, torch=f"__version__ = '{version}'")


@dataclass(frozen=True)
class Site:
    folder: Path
    url: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The indexes of all wheels, and beside them a main index, which has torch."""
    folder = tmp_path_factory.mktemp("site")
    handler = functools.partial(SilentHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        wheels = [
            make_ours(folder / "files", torch, device, tag)
            for torch in TORCHES
            for device in ("cpu", "cu130")
            for tag in [OWN_TAG, *FOREIGN_TAGS]
        ]
        wheels += [
            make_ours(folder / "files", torch, "cpu", f"{PYTHON}-{PYTHON}-{ARM}")
            for torch in TORCHES
        ]
        wheel_index.make_indexes(folder / "whl", [link_to(wheel, url) for wheel in wheels])
        torches = [make_torch(folder / "main" / "torch", f"{torch}+cu130") for torch in TORCHES]
        anchors = [f'<a href="{wheel.name}">{wheel.name}</a>' for wheel in torches]
        (folder / "main" / "torch" / "index.html").write_text("".join(anchors))
        yield Site(folder, url)
        server.shutdown()


class SilentHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def link_to(wheel: Path, url: str) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return f"{url}/files/{wheel.name.replace('+', '%2B')}#sha256={digest}"


class Environment:
    """A virtual environment with nothing but pip and a torch, which is `before`."""

    def __init__(self, folder: Path, torch: str) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        (self.packages,) = folder.glob("lib/python*/site-packages")
        (self.packages / "pip").symlink_to(PIP)
        self.add(make_torch(folder, torch))
        self.before = self.installed

    def add(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.packages)

    def run(self, command: str, **variables: str) -> str:
        """What a command of a shell prints. No setting of this machine counts."""
        return subprocess.run(
            ["sh", "-c", f'pip() {{ python -m pip "$@"; }}; {command}'],
            env={
                "HOME": str(self.folder),
                "PATH": f"{self.folder}/bin:{os.defpath}",
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLOCK,
        ).stdout

    @property
    def installed(self) -> set[str]:
        return {info.stem for info in self.packages.glob("*.dist-info")}

    @property
    def tag(self) -> str:
        (file,) = self.packages.glob("torch_powersgd-*.dist-info/WHEEL")
        return file.read_text().splitlines()[-1].removeprefix("Tag: ")


def ours(torch: str) -> set[str]:
    return {f"torch_powersgd-0.1.0+torch{torch.replace('+', '.')}"}


@pytest.mark.parametrize("torch", ["2.12.1+cpu", "2.13.0+cu130"])
def test_the_lines_of_the_page_install_what_fits(site: Site, tmp_path: Path, torch: str) -> None:
    environment = Environment(tmp_path, torch)
    output = environment.run(BY_TORCH.replace(SITE, site.url))
    assert environment.installed == environment.before | ours(torch), output
    assert environment.tag == OWN_TAG


def test_the_lines_of_the_page_install_the_cpu_wheel_for_a_cuda_torch_on_arm(
    site: Site, tmp_path: Path
) -> None:
    environment = Environment(tmp_path, "2.13.0+cu130")
    on_arm = f" --platform {ARM} --only-binary :all: --no-deps --target {environment.packages}"
    output = environment.run(BY_TORCH.replace(SITE, site.url).rstrip() + on_arm)
    assert environment.installed == environment.before | ours("2.13.0+cpu"), output
    assert environment.tag.endswith(ARM)


@pytest.mark.parametrize(
    ("command", "torch", "missing"),
    [
        (BY_HAND, "2.13.1+cpu", "torch==2.13.0"),  # the index of another torch,
        (BY_TORCH, "2.13.1+cpu", "torch-powersgd"),  # none for this torch,
        (BY_TORCH, "2.13.0", "torch-powersgd"),  # and a torch that does not name its device
    ],
)
def test_a_torch_that_does_not_fit_is_an_error_and_stays(
    site: Site, tmp_path: Path, command: str, torch: str, missing: str
) -> None:
    environment = Environment(tmp_path, torch)
    output = environment.run(command.replace(SITE, site.url))
    assert f"No matching distribution found for {missing}" in output
    assert environment.installed == environment.before


def test_with_an_extra_index_pip_would_replace_torch(site: Site, tmp_path: Path) -> None:
    environment = Environment(tmp_path, "2.12.1+cpu")
    command = BY_HAND.replace("--index-url", "--extra-index-url").replace(SITE, site.url)
    environment.run(command, PIP_INDEX_URL=f"{site.url}/main")
    assert environment.installed == {"torch-2.13.0"} | ours("2.13.0+cpu")


@pytest.mark.parametrize(
    ("before", "after"), [("2.12.1+cpu", "2.13.0+cpu"), ("2.13.0+cu130", "2.13.0+cpu")]
)
def test_the_wheel_follows_torch(site: Site, tmp_path: Path, before: str, after: str) -> None:
    environment = Environment(tmp_path, after)
    environment.add(make_ours(tmp_path, *before.split("+")))
    output = environment.run(AFTER_UPGRADE.replace(SITE, site.url))
    assert environment.installed == environment.before | ours(after), output


def test_a_wheel_that_was_changed_is_refused(tmp_path: Path) -> None:
    link = make_ours(tmp_path, "2.13.0", "cpu").as_uri()
    wheel_index.make_indexes(tmp_path / "whl", [f"{link}#sha256={'0' * 64}"])
    environment = Environment(tmp_path / "environment", "2.13.0+cpu")
    output = environment.run(BY_TORCH.replace(SITE, tmp_path.as_uri()))
    assert "DO NOT MATCH THE HASHES" in output
    assert environment.installed == environment.before


def test_the_pages_lead_to_every_index_and_each_has_one_torch(site: Site) -> None:
    found: dict[str, list[str]] = {}

    def visit(folder: Path) -> None:
        for target in re.findall('href="([^"]+)"', (folder / "index.html").read_text()):
            if target.endswith("/"):
                visit(folder / target)
            else:
                place = folder.relative_to(site.folder / "whl")
                found.setdefault(str(place), []).append(target)

    visit(site.folder / "whl")
    assert sorted(found) == [
        f"torch{torch}/{device}/torch-powersgd" for torch in TORCHES for device in ("cpu", "cu130")
    ]
    for place, links in found.items():
        torch, device, _ = place.split("/")
        assert sum(f"%2B{torch}.{device}-" in link for link in links) >= 1 + len(FOREIGN_TAGS)
        assert all(
            f"%2B{torch}.{device}-" in link or (f"%2B{torch}.cpu-" in link and "aarch64" in link)
            for link in links
        )


@pytest.mark.parametrize(
    "link",
    [
        "https://x/torch_powersgd-0.1.0+torch2.13.0.cpu-cp312-cp312-linux_x86_64.whl",  # no hash
        f"https://x/torch_powersgd-0.1.0-cp312-cp312-linux_x86_64.whl#sha256={'0' * 64}",
        f"https://x/torch_powersgd-0.1.0.tar.gz#sha256={'0' * 64}",
        f"https://x/torch-2.13.0+cpu-cp312-cp312-linux_x86_64.whl#sha256={'0' * 64}",
    ],
)
def test_a_link_to_anything_else_is_an_error(tmp_path: Path, link: str) -> None:
    with pytest.raises(SystemExit, match="with the device cpu or cuNNN, got https://x/torch"):
        wheel_index.make_indexes(tmp_path, [link])


def test_the_page_lists_what_the_workflow_builds() -> None:
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    for name, row in (("torch", "torch"), ("python", "Python")):
        (built,) = re.findall(rf"^ +{name}: \[(.*)\]$", workflow, re.MULTILINE)
        (listed,) = re.findall(rf"^\| {row} \| ([^|;]*)", PAGE, re.MULTILINE)
        assert listed.strip().split(", ") == built.replace('"', "").split(", ")
