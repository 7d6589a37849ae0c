"""The camera-path editor on the page of ``splat view``: key frames of the view, saved as a camera path.

The page imports ``path_editor.js``, which has the panel and the keys; ``camera_path.js`` has the interpolation and the
file. Nothing is sent back to the server: the browser saves the file.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from splatcli.formats.html import PageModule
from splatcli.viewer.http_server import Response

_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_MAIN, _OTHERS = "path_editor.js", ("camera_path.js", "path_editor.css")


def editor_module(model: Path, flags: Sequence[str] = ()) -> PageModule:
    """Return what the page of a model starts.

    model: as a command names it. flags: of the command that reads it. A browser keeps key frames for each model; by a
    digest, since the page may be served to others, whom the folders of this machine do not concern.
    """
    command = shlex.join(["splat", "render", str(model), *flags])
    digest = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:16]
    return PageModule(f"./{_MAIN}", {"model": digest, "command": command})


def editor_documents() -> dict[str, Response]:
    """Return the documents that the page asks for, by path."""
    return {f"/{name}": _document(name) for name in (_MAIN, *_OTHERS)}


def _document(name: str) -> Response:
    return Response(_KINDS[Path(name).suffix], (files("splatcli.viewer") / name).read_bytes())
