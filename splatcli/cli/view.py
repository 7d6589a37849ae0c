"""``splat view``: a model in a browser, served by this machine to itself."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splatcli.cli import options
from splatcli.errors import SplatError, UsageError

if TYPE_CHECKING:
    from splatcli.checkpoint.foreign.stored import ImportOptions
    from splatcli.cli.console import Output
    from splatcli.render.server import Document, Request

_PAGE = "/"

#: A scene is shown as a PLY, which is exact, and made at once where a SOG of millions takes minutes; over a loopback
#: its size does not matter. One of more Gaussians, a gigabyte with harmonics, is much for a browser to hold at once.
_MOST_EXACT = 4_000_000

#: The highest degree of harmonics that the viewer shows.
_SH_DEGREE = 3


def view(
    model: options.Model = None,
    port: options.Port = None,
    host: options.Host = "127.0.0.1",
    open_browser: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Show the page in the browser of this machine.  [default: where there is a display]",
            show_default=False,
        ),
    ] = None,
    param_space: options.ParamSpace = None,
    lenient: options.Lenient = False,
    drop_nonfinite: options.DropNonfinite = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    """Look at a model in a browser: fly and orbit through it, with its full colours.

    Prints the address of the page and serves it until Ctrl-C, which is how this command ends well. Only this machine
    reaches it, and the page loads nothing from the internet. Of a run folder the newest checkpoint is shown, and
    reloading the page shows a newer one. `splat export -o x.html` makes a page that needs no server.

    \b
    Examples:
      splat view output/scene
      splat view scene.ply --port 9000 --no-open
      splat train scene/ | splat view
      ssh -L 8080:127.0.0.1:8080 machine splat view output/scene --port 8080
    """
    from splatcli.cli.console import speaking
    from splatcli.cli.pages import serving

    with speaking(json=json, quiet=quiet) as out:
        shown = _Shown(model, options.reading(param_space, lenient, drop_nonfinite), out)
        with serving(shown, host=host, port=port, risk="look at this model, and copy it", out=out) as server:
            shown.load()
            with suppress(KeyboardInterrupt):
                out.result({"url": server.url, "path": shown.path}, [server.url])
                out.note("Ctrl-C ends it")
                if _has_display() if open_browser is None else open_browser:
                    open_page(server.url)
                wait()
    return 0


class _Shown:
    """The page of a model and its scene, by their paths; asked for the page, it looks for a newer checkpoint first."""

    def __init__(self, model: Path | None, reading: ImportOptions, out: Output) -> None:
        from splatcli.cli.model import find_model, run_folder

        self.path = find_model(model, out=out, allow_older=True)
        self._folder = run_folder(self.path) if model is None else model if model.is_dir() else None
        self._reading = reading
        self._out = out
        self._documents: dict[str, Document] = {}
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Document | None:
        with self._lock:
            if request.path == _PAGE:
                self._look_again()
            return self._documents.get(request.path)

    def load(self) -> None:
        """Read the model, and show it from now on. Raises ModelFileError, UsageError, DivergedError."""
        from splatcli.cli.model import load_model
        from splatcli.formats.compressed_ply import encode_compressed_ply
        from splatcli.formats.html import viewer_page
        from splatcli.formats.ply import encode_ply
        from splatcli.formats.quantisation import ExportMetadata
        from splatcli.formats.selection import select
        from splatcli.render.server import Document

        loaded = load_model(self.path, reading=self._reading, say=self._out.note)
        if not len(loaded.gaussians):
            raise UsageError("the model has no Gaussians to look at", where=self.path, remedy="name another model")
        gaussians, _ = select(loaded.gaussians, sh_degree=min(_SH_DEGREE, loaded.gaussians.sh_degree))
        told = ExportMetadata.of(loaded.checkpoint)
        exact = len(gaussians) <= _MOST_EXACT
        name, encode = ("scene.ply", encode_ply) if exact else ("scene.compressed.ply", encode_compressed_ply)
        self._documents = {
            _PAGE: Document("text/html; charset=utf-8", viewer_page(name, name, gaussians, told)),
            f"/{name}": Document("application/octet-stream", encode(gaussians, told).payload),
        }
        self._out.note(f"{self.path}: {len(gaussians):,} Gaussians" + ("" if exact else ", shown as a compressed PLY"))
        if loaded.gaussians.sh_degree > _SH_DEGREE:
            self._out.note(f"note: shown to SH degree {_SH_DEGREE}, the most that the viewer knows")

    def _look_again(self) -> None:
        """Take the newest checkpoint of a run; one that cannot be read does not take the place of one that could."""
        from splatcli.cli.model import find_model

        if self._folder is None:
            return
        before = self.path
        try:
            self.path = find_model(self._folder, out=self._out, allow_older=True)
            if self.path != before:
                self.load()
        except SplatError as error:
            self.path = before
            self._out.warn(str(error))


def wait() -> None:
    """For a signal."""
    threading.Event().wait()


def open_page(url: str) -> None:
    """Show a page in the browser of this machine; not waited for, since some browsers never return."""
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _has_display() -> bool:
    """Whether a browser would have somewhere to appear; without, Python starts one for terminals, if there is one."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
