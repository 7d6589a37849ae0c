"""The camera-path editor of the viewers: key frames of the view, saved as a camera path.

``path_editor.js`` has the panel and the keys, ``camera_path.js`` the interpolation and the file. Each page imports its
own view, which the editor reads and moves: ``supersplat_view.js`` on the page of ``splat view``, ``live_view.js`` on
that of a run. Nothing is sent back to the server: the browser saves the file.
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
_SHARED = ("path_editor.js", "camera_path.js", "path_editor.css")
#: The views of the two pages.
SUPERSPLAT_VIEW, LIVE_VIEW = "supersplat_view.js", "live_view.js"


def editor_module(model: Path, flags: Sequence[str] = ()) -> PageModule:
    """Return what the page of a model starts. model, flags: as of editor_settings()."""
    return PageModule(f"./{SUPERSPLAT_VIEW}", editor_settings(model, flags))


def editor_settings(model: Path, flags: Sequence[str] = ()) -> dict[str, str]:
    """Return the settings of the editor on a page.

    model: as a command names it. flags: of the command that reads it. A browser keeps key frames for each model; by a
    digest, since the page may be served to others, whom the folders of this machine do not concern.
    """
    command = shlex.join(["splat", "render", str(model), *flags])
    digest = hashlib.sha256(os.fsencode(model.absolute())).hexdigest()[:16]
    return {"model": digest, "command": command}


def editor_documents(view: str) -> dict[str, Response]:
    """Return the documents that a page asks for, by path. view: the page's own."""
    return {f"/{name}": _document(name) for name in (view, *_SHARED)}


def _document(name: str) -> Response:
    return Response(_KINDS[Path(name).suffix], (files("splatcli.viewer") / name).read_bytes())
