"""A few documents on a port of this machine for browsers to read; nothing else is answered, and no file is opened.

Pages from elsewhere that the same browser shows get none of them: a request has to be addressed to this machine (a site
whose name was pointed here says its own), documents may not be shown elsewhere, and what does something wants a header
that only a page from here can send. The page itself is told to load nothing from elsewhere.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from splatcli.errors import ResourceError, UsageError

#: Where a port is looked for first; this many are tried.
FIRST_PORT, PORTS = 8080, 20

_HOSTS = "127.0.0.1 for this machine alone, 0.0.0.0 for all who reach it, or one of its addresses"

#: What a page may do: its own scripts and styles, which are inside it, WebAssembly, and workers made of its own text.
_POLICY = (
    "default-src 'self' 'unsafe-inline' data: blob:; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval' data: blob:; "
    "connect-src 'self' data: blob:; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


#: A header that browsers send for scripts of other sites only after asking, and are refused.
OWN = "X-Splat"


@dataclass(frozen=True, slots=True)
class Request:
    """What a browser asks for: GET or POST, a path, the query behind it. own: a script of a page from here asks."""

    method: str
    path: str
    query: Mapping[str, str]
    own: bool


@dataclass(frozen=True, slots=True)
class Document:
    """An answer: its media type and content; an HTTP status and more headers where those are not the usual ones."""

    kind: str
    content: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


#: Answers a request, or has nothing for it; called by several threads at once.
Shelf = Callable[[Request], Document | None]


class DocumentServer(ThreadingHTTPServer):
    """Answers with what ``shelf`` has, from serve_forever() on until it is closed; made by listen()."""

    daemon_threads = True
    #: A port that another program listens on is busy; one that was just given up is not.
    allow_reuse_address = True

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int], shelf: Shelf) -> None:
        self.address_family = family
        self.shelf = shelf
        super().__init__(address, _Handler)
        self.local = is_loopback(address[0])

    @property
    def url(self) -> str:
        """Where a browser on this machine finds the document "/"."""
        host, port = str(self.server_address[0]), self.server_address[1]
        if ipaddress.ip_address(host).is_unspecified:
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in mid-answer is nobody's business."""


class _Handler(BaseHTTPRequestHandler):
    server: DocumentServer
    protocol_version = "HTTP/1.1"
    server_version = "splat"
    sys_version = ""
    #: Seconds after which a connection on which nothing comes is closed.
    timeout = 60

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self.close_connection = True  # with whatever it brings along: all that is asked for is in the path
        self._answer("POST")

    def _answer(self, method: str) -> None:
        if self.server.local and not _is_local_name(self.headers.get("Host", "")):
            self.send_error(403, explain="This server answers to localhost only; --host makes it answer to others.")
            return
        place = urlsplit(self.path)
        document = self.server.shelf(Request(method, place.path, dict(parse_qsl(place.query)), OWN in self.headers))
        if document is None:
            self.send_error(404)
            return
        self.send_response(document.status)
        self.send_header("Content-Type", document.kind)
        self.send_header("Content-Length", str(len(document.content)))
        for name, value in (_HEADERS | dict(document.headers)).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(document.content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line."""


def listen(host: str, port: int | None, shelf: Shelf) -> DocumentServer:
    """A server that answers once serve_forever() is called on it.

    port: 0 is any free one; None is FIRST_PORT or, when that is taken, one of the next, or any.
    Raises UsageError for a host that is none of this machine's, ResourceError for a port that cannot be had.
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"there is no address {host!r}", where="--host", remedy=_HOSTS) from None
    address = str(found[0])
    ports = [*range(FIRST_PORT, FIRST_PORT + PORTS), 0] if port is None else [port]
    for number in ports:
        try:
            return DocumentServer(family, (address, number), shelf)
        except PermissionError:
            raise ResourceError(
                f"port {number} is for the administrator's programs",
                where="--port",
                remedy="take one from 1024 on, or none: a free one is found",
            ) from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"cannot listen at {host}: {error.strerror}", where="--host", remedy=_HOSTS) from None
    raise ResourceError(
        f"port {port} is taken by another program",
        where="--port",
        remedy="take another, or none: a free one is found",
    )


def is_loopback(address: str) -> bool:
    """Whether only programs on this machine reach this address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def _is_local_name(host: str) -> bool:
    """Whether the host that a request is addressed to, with its port, is this machine by its own names."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return is_loopback(name.removeprefix("[").removesuffix("]"))
