"""A headless Chromium that looks at pages, where there is one: @sparticuz/chromium and puppeteer-core.

They lie in the folder that the variable SPLATCLI_NODE_MODULES names: `npm i @sparticuz/chromium puppeteer-core` there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest
from numpy.typing import NDArray

MODULES = Path(os.environ.get("SPLATCLI_NODE_MODULES", "node_modules"))

#: When the viewer inside exported pages has drawn its first whole picture.
DRAWN = "window.isDrawn"


@dataclass(frozen=True)
class Look:
    """A browser's view of a page: [H, W, 3] uint8; requests that were made; errors in the page and in its console.

    value: of the expression that was waited for.
    """

    pixels: NDArray[np.uint8]
    requests: list[str]
    errors: list[str]
    value: Any = None


def node() -> str:
    """The Node that lies among the modules, else the machine's."""
    own = MODULES / "node/bin/node"
    return str(own) if own.exists() else shutil.which("node") or ""


def look_at(url: str, picture: Path, size: tuple[int, int], *, ready: str = DRAWN, element: str = "") -> Look:
    """Open a page in a window of ``size``, wait until ``ready`` is true there, and take its picture.

    element: a selector of a canvas, whose own pixels are taken instead. The network ends at this machine.
    """
    if not (MODULES / "@sparticuz/chromium").exists() or not node():
        pytest.skip("no headless Chromium (SPLATCLI_NODE_MODULES)")
    script = Path(__file__).with_name("screenshot.mjs")
    words = [str(MODULES.resolve()), url, str(picture), *map(str, size), ready, *([element] if element else [])]
    done = subprocess.run(
        [node(), str(script), *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={**os.environ, "LANG": "en_US.UTF-8"},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return Look(imageio.imread(picture)[..., :3], report["requests"], report["errors"], report["value"])
