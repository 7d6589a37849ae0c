"""Pages that a command serves: where, and for how long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from splatcli.cli.console import Output

if TYPE_CHECKING:
    from splatcli.render.live import LiveRun
    from splatcli.render.server import DocumentServer, Shelf

#: Seconds between two looks of a server at whether it should end.
_POLL = 0.1


@contextmanager
def serving(shelf: Shelf, *, host: str, port: int | None, risk: str, out: Output) -> Iterator[DocumentServer]:
    """A server that answers with what ``shelf`` has, in threads of its own, while open.

    risk: what others can do where they reach it, for a warning. Raises UsageError and ResourceError as listen().
    """
    from splatcli.render.server import is_loopback, listen

    with listen(host, port, shelf) as server:
        if not is_loopback(str(server.server_address[0])):
            out.warn(f"whoever reaches this machine at {host} can {risk}")
        thread = threading.Thread(target=server.serve_forever, args=(_POLL,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()


@contextmanager
def live_page(wanted: bool, *, host: str | None, port: int | None, out: Output) -> Iterator[LiveRun | None]:
    """A page that shows a run while it trains, served while open; None where none is wanted. A place asks for one.

    Of several processes of a run, the one that speaks serves it.
    """
    if out.muted or (not wanted and host is None and port is None):
        yield None
        return
    from splatcli.render.live import LiveRun

    live = LiveRun()
    risk = "watch this run, and pause it"
    with serving(live, host=host or "127.0.0.1", port=port, risk=risk, out=out) as server:
        out.note(f"viewer: {server.url}")
        out.event("viewer", {"url": server.url})
        yield live
