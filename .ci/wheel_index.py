# SPDX-License-Identifier: BSD-3-Clause
"""Makes package indexes for pip (PEP 503) from links to wheels.

    python .ci/wheel_index.py FOLDER < LINKS

LINKS has one link to a wheel per line, .../NAME.whl#sha256=HASH. The wheels stay where they are.

pip picks the highest version in an index, and replaces the installed torch if that version requires
another one. So each torch version and device has its own index, which torch.__version__ names:
2.13.0+cu130 uses FOLDER/torch2.13.0/cu130. On ARM, torch is built for CUDA by default but this
package only for CPUs, so the CUDA indexes also list the CPU wheels for ARM.
"""

from __future__ import annotations

import html
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

_FORM = ".../torch_powersgd-VERSION+torchVERSION.DEVICE-TAGS.whl#sha256=HASH"
_LINK = re.compile(
    r"(?:.*/)?(?P<wheel>torch_powersgd-[^-+]+\+torch(?P<torch>[^-]+)\.(?P<device>cpu|cu\d+)-[^/]+\.whl)"
    r"#sha256=[0-9a-f]{64}"
)


def make_indexes(folder: Path, links: Iterable[str]) -> None:
    """Writes to `folder` a page for each torch version and device, and pages that link to it."""
    wheels = {link: _LINK.fullmatch(unquote(link)) for link in links}
    pages: defaultdict[Path, dict[str, str]] = defaultdict(dict)  # texts by link, by folder
    for link, match in wheels.items():
        if match is None:
            raise SystemExit(f"a link must be {_FORM} with the device cpu or cuNNN, got {link}")
        devices = {match["device"]}
        if "cpu" in devices and "aarch64" in match["wheel"]:
            devices |= {m["device"] for m in wheels.values() if m and m["torch"] == match["torch"]}
        for device in devices:
            place = folder / f"torch{match['torch']}" / device / "torch-powersgd"
            pages[place][link] = match["wheel"]
            while place != folder:
                pages[place.parent][f"{place.name}/"] = place.name
                place = place.parent
    for place, texts in pages.items():
        place.mkdir(parents=True, exist_ok=True)
        lines = sorted(f'<a href="{html.escape(at)}">{text}</a><br>' for at, text in texts.items())
        head = "<!DOCTYPE html>\n<title>Wheels of torch-powersgd</title>"
        (place / "index.html").write_text("\n".join([head, *lines, ""]))


if __name__ == "__main__":
    make_indexes(Path(sys.argv[1]), sys.stdin.read().split())
