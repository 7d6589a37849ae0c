"""``splat view``: a model in a browser; and the pages that commands serve."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splatcli.cli import options
from splatcli.cli.console import Output
from splatcli.errors import SplatError

if TYPE_CHECKING:
    from splatcli.cli.console import Output
    from splatcli.viewer.http_server import PageServer, Request, Responder, Response
    from splatcli.viewer.live_viewer import LiveRun


#: Seconds between two checks of a server for its end.
_POLL = 0.1


@contextmanager
def serving(
    responder: Responder, *, host: str, port: int | None, risk: str, out: Output, flags: str = "--"
) -> Iterator[PageServer]:
    """Serve the answers of ``responder`` in background threads while open.

    risk: what others can do with the page, for a warning. flags: what the flags for host and port begin with.
    Raises UsageError and ResourceError as listen().
    """
    from splatcli.viewer.http_server import is_loopback, listen

    with listen(host, port, responder, flags=flags) as server:
        if not is_loopback(str(server.server_address[0])):
            out.warn(f"anyone who reaches this machine at {host} can {risk}")
        thread = threading.Thread(target=server.serve_forever, args=(_POLL,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()


@contextmanager
def live_page(wanted: options.ViewerOptions, out: Output) -> Iterator[LiveRun | None]:
    """Serve a page that shows a run while it trains; None without --viewer, --viewer-host and --viewer-port.

    Of several processes of a run, only the one that prints serves it.
    """
    if out.muted or wanted == options.ViewerOptions():
        yield None
        return
    from splatcli.viewer.live_viewer import LiveRun

    live = LiveRun()
    host = "127.0.0.1" if wanted.host is None else wanted.host
    risk = "watch and pause this run"
    with serving(live, host=host, port=wanted.port, risk=risk, out=out, flags="--viewer-") as server:
        out.message(f"viewer: {server.url}")
        out.event("viewer", {"url": server.url})
        yield live


_PAGE = "/"

#: A scene is shown as a PLY, which is exact, and made at once where a SOG of millions takes minutes; over a loopback
#: its size does not matter. One of more Gaussians, a gigabyte with harmonics, is much for a browser to hold at once.
_MOST_EXACT = 4_000_000

#: The highest degree of harmonics that the viewer shows.
_SH_DEGREE = 3


@dataclass(frozen=True)
class ViewArguments:
    """The arguments and options of ``splat view``."""

    model: options.Model = None
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65535,
            help="Port of the page; 0 uses any free port.  [default: the first free one from 8080 on]",
        ),
    ] = None
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="Address of the page; with 0.0.0.0 all machines that reach this one see it.",
        ),
    ] = "127.0.0.1"
    open_browser: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Open the page in the browser of this machine.  [default: where there is a display]",
            show_default=False,
        ),
    ] = None
    json: options.Json = False
    quiet: options.Quiet = False
    foreign: options.ForeignModelOptions = field(default_factory=options.ForeignModelOptions)


def view(args: ViewArguments) -> int:
    """Show a model in a browser, to fly and orbit through it with its full colours, and to make camera paths.

    Prints the address of the page and serves it until Ctrl-C, which ends the command with 0. Only this machine reaches
    the page, which loads nothing from the internet. For a run folder the page shows the newest checkpoint, also after a
    reload. `splat export -o x.html` makes a page that needs no server.

    Key K or the button "Camera path" adds a key frame; the page saves them as a file for `splat render --views`.

    \b
    Examples:
      splat view output/scene
      splat view scene.ply --port 9000 --no-open
      splat train scene/ | splat view
      splat render output/scene --views camera_path.json -o path.mp4
      ssh -L 8080:127.0.0.1:8080 machine splat view output/scene --port 8080
    """
    from splatcli.cli.console import open_output

    with open_output(json=args.json, quiet=args.quiet) as out:
        shown = _ModelPage(args.model, args.foreign, out)
        with serving(shown, host=args.host, port=args.port, risk="view and copy this model", out=out) as server:
            shown.load()
            with suppress(KeyboardInterrupt):
                out.result({"url": server.url, "path": shown.path}, [server.url])
                out.message("Press Ctrl-C to stop")
                if _has_display() if args.open_browser is None else args.open_browser:
                    open_page(server.url)
                wait()
    return 0


class _ModelPage:
    """Serves the page of a model and its data. Each request for the page loads a newer checkpoint, if there is one."""

    def __init__(self, model: Path | None, foreign: options.ForeignModelOptions, out: Output) -> None:
        from splatcli.cli.model import find_model, run_folder

        self.path = find_model(model, out=out, allow_older=True)
        self._folder = run_folder(self.path) if model is None else model if model.is_dir() else None
        self._reading = foreign.import_options()
        self._flags = foreign.flags()
        self._out = out
        self._documents: dict[str, Response] = {}
        self._loaded: tuple[Path, int, int] | None = None
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Response | None:
        from splatcli.viewer.http_server import READ_ONLY

        with self._lock:
            if request.method != "GET":
                return READ_ONLY if request.path in self._documents else None
            if request.path == _PAGE:
                self._load_newer()
            return self._documents.get(request.path)

    def load(self) -> None:
        """Load the model for the page. Raise ModelFileError, UsageError or DivergedError."""
        from splatcli.cli.model import load_model, refuse_empty
        from splatcli.formats.compressed_ply import encode_compressed_ply
        from splatcli.formats.format import ExportMetadata
        from splatcli.formats.html import viewer_page
        from splatcli.formats.ply import encode_ply
        from splatcli.formats.selection import select
        from splatcli.viewer.http_server import Response
        from splatcli.viewer.path_editor import SUPERSPLAT_VIEW, editor_documents, editor_module

        version = _version(self.path)  # before it is read: a file that is replaced meanwhile is read again
        loaded = load_model(self.path, import_options=self._reading, out=self._out)
        refuse_empty(loaded)
        gaussians, _ = select(loaded.gaussians, sh_degree=min(_SH_DEGREE, loaded.gaussians.sh_degree))
        reported = replace(
            ExportMetadata.of(loaded.checkpoint, antialiased=loaded.antialiased),
            title=f"{(self._folder or self.path).absolute().name} \u00b7 splat view",
        )
        exact = len(gaussians) <= _MOST_EXACT
        name, encode = ("scene.ply", encode_ply) if exact else ("scene.compressed.ply", encode_compressed_ply)
        editor = editor_module(self._folder or self.path, self._flags)
        page = viewer_page(name, name, gaussians, reported, module=editor)
        self._documents = {
            _PAGE: Response("text/html; charset=utf-8", page),
            f"/{name}": Response("application/octet-stream", encode(gaussians, reported).payload),
            **editor_documents(SUPERSPLAT_VIEW),
        }
        self._loaded = version
        self._out.message(
            f"{self.path}: {len(gaussians):,} Gaussians" + ("" if exact else ", shown as a compressed PLY")
        )
        if loaded.gaussians.sh_degree > _SH_DEGREE:
            self._out.note(f"shown up to SH degree {_SH_DEGREE}, the limit of the viewer")

    def _load_newer(self) -> None:
        """Load the newest checkpoint of a run; keep the present one if that fails."""
        from splatcli.cli.model import find_model

        if self._folder is None:
            return
        before = self.path
        try:
            self.path = find_model(self._folder, out=self._out, allow_older=True)
            if _version(self.path) != self._loaded:
                self.load()
        except SplatError as error:
            self.path = before
            self._out.warn(str(error))


def _version(path: Path) -> tuple[Path, int, int] | None:
    """Return an identity that changes when another file takes the path; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return path, found.st_ino, found.st_mtime_ns


def wait() -> None:
    """Wait for a signal."""
    threading.Event().wait()


def open_page(url: str) -> None:
    """Open a page in the browser of this machine, in a thread, since some browsers never return."""
    threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def _has_display() -> bool:
    """Return whether there is a display; without one, webbrowser would start a browser in the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
