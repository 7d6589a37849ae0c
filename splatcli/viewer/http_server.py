"""A small HTTP server that gives browsers a few documents; it answers nothing else and opens no file.

Pages of other sites in the same browser get none of them: a request must be addressed to this machine (a foreign name
that resolves here is refused) and must not come from another origin, documents cannot be embedded elsewhere, and
requests with an effect need a header that only scripts of these pages can send. The pages may load nothing from
elsewhere.

Connections cannot starve the process: their number is limited, the one that is idle longest is closed for a new one,
each has a few seconds to send a whole request, and some file descriptors are reserved.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from splatcli.errors import ResourceError, UsageError

try:
    import resource
except ImportError:  # no such limits on this system
    resource = None  # type: ignore[assignment]

_log = logging.getLogger(__name__)

#: The first port to try, and the number of ports to try.
FIRST_PORT, PORTS = 8080, 20

#: Maximum number of open connections, and their share of the process's file descriptors.
MAX_CONNECTIONS, _DESCRIPTOR_SHARE = 64, 0.25
#: File descriptors that are reserved for the rest of the process, such as saves.
RESERVED_DESCRIPTORS = 64
#: Seconds in which a connection must send a whole request, from its start or the end of the last response.
REQUEST_SECONDS = 10.0
#: Seconds in which a browser must receive a piece of a response, and the bytes of a piece.
_WRITE_SECONDS, _PIECE = 60.0, 1 << 20
#: Seconds that a new connection waits until an idle one is closed.
_GIVE_WAY = 1.0

_HOSTS = "127.0.0.1 for this machine only, 0.0.0.0 for all who reach it, or one of its addresses"

#: Pages may use their inline scripts and styles, WebAssembly, and workers made from inline text.
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


#: A header that scripts of other sites cannot send: their preflight request is refused.
OWN = "X-Splat"


@dataclass(frozen=True, slots=True)
class Request:
    """A request: GET or POST, path and query. own: it comes from a script of a page of this server."""

    method: str
    path: str
    query: Mapping[str, str]
    own: bool


@dataclass(frozen=True, slots=True)
class Response:
    """A response: media type, content, HTTP status, further headers."""

    kind: str
    content: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


#: To a request to change a document that can only be read.
READ_ONLY = Response("text/plain; charset=utf-8", b"this page is only read\n", 405, {"Allow": "GET, HEAD"})

#: Returns the response to a request, or None; called by several threads at once.
Responder = Callable[[Request], Response | None]


class PageServer(ThreadingHTTPServer):
    """Serves the responses of ``responder`` from serve_forever() on until it is closed; made by listen()."""

    daemon_threads = True
    #: A port that was just released can be reused; one that another program listens on cannot.
    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        responder: Responder,
        names: frozenset[str] = frozenset(),
    ) -> None:
        """names: host names, beside addresses, that requests may be addressed to if others reach this server."""
        self.address_family = family
        self.responder = responder
        self._names = names
        self._connections = threading.Condition()  # of the next two
        self._open: set[socket.socket] = set()
        self._waiting: dict[socket.socket, float] = {}  # since when each waits for a request, the longest first
        super().__init__(address, _Handler)
        self.local = is_loopback(address[0])

    @property
    def url(self) -> str:
        """Return the URL of the page "/" for a browser on this machine."""
        host, port = str(self.server_address[0]), self.server_address[1]
        if ipaddress.ip_address(host).is_unspecified:
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects during a response."""

    def refusal(self, headers: Message) -> str | None:
        """Return why a request with these headers is refused; None if it is not."""
        host = headers.get("Host", "")
        name = _host_name(host)
        if self.local and not is_loopback(name):
            return "This server answers localhost only; --host makes it answer others."
        if not (self.local or is_loopback(name) or _is_address(name) or name.lower() in self._names):
            return "This server answers to its address and to the name given by --host."
        if any(not _is_same_origin(origin, host) for origin in headers.get_all("Origin", [])):
            return "Pages of other sites get nothing from this server."
        # Links of other sites may lead here; their pages may not load anything.
        foreign = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if foreign and headers.get("Sec-Fetch-Mode") != "navigate":
            return "Pages of other sites get nothing from this server."
        return None

    # Connections: the thread of serve_forever() admits them, and one thread each serves them.

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)  # mostly a lack of descriptors; without a pause it is retried at once
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether to serve a new connection; close the one that is idle longest if there are too many."""
        with self._connections:
            limit, last = _connection_limits()
            if len(self._open) >= limit and self._waiting:
                self._drop(next(iter(self._waiting)))
                self._connections.wait_for(lambda: len(self._open) < limit, timeout=_GIVE_WAY)
            # The system assigns the lowest free descriptor.
            if len(self._open) >= limit or request.fileno() >= last:
                _log.debug("a connection is refused: %d are open", len(self._open))
                return False
            self._open.add(request)
            self._waiting[request] = time.monotonic()  # in the order of arrival, whichever thread starts first
        return True

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._connections:
            self._open.discard(request)
            self._waiting.pop(request, None)
            self._connections.notify_all()

    def service_actions(self) -> None:
        """Close connections that have not sent a whole request in time."""
        with self._connections:
            late = time.monotonic() - REQUEST_SECONDS
            for connection in [connection for connection, since in self._waiting.items() if since < late]:
                self._drop(connection)

    def await_request(self, connection: socket.socket) -> None:
        """Start the time limit in which ``connection`` must send a request."""
        with self._connections:
            self._waiting[connection] = time.monotonic()

    def request_received(self, connection: socket.socket) -> None:
        """End the time limit: a whole request has arrived."""
        with self._connections:
            self._waiting.pop(connection, None)

    def _drop(self, connection: socket.socket) -> None:
        """Shut down an idle connection; its thread then closes it."""
        self._waiting.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "splat"
    sys_version = ""
    timeout = _WRITE_SECONDS

    def handle_one_request(self) -> None:
        self.server.await_request(self.connection)
        super().handle_one_request()

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self.server.request_received(self.connection)
        return parsed

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("GET")  # as GET, without the content

    def do_POST(self) -> None:
        self.close_connection = True  # a body is not read: the path is the whole request
        self._answer("POST")

    def _answer(self, method: str) -> None:
        if (reason := self.server.refusal(self.headers)) is not None:
            self.send_error(403, explain=reason)
            return
        try:
            place = urlsplit(self.path)
        except ValueError:
            self.send_error(400)
            return
        try:
            asked = Request(method, place.path, dict(parse_qsl(place.query)), OWN in self.headers)
            document = self.server.responder(asked)
        except Exception as error:  # mostly a lack of memory; the browser and the log get it
            _log.warning("%s could not be served: %s", place.path, str(error) or type(error).__name__)
            self.send_error(500, explain=type(error).__name__)
            return
        if document is None:
            self.send_error(404)
            return
        self.send_response(document.status)
        self.send_header("Content-Type", document.kind)
        self.send_header("Content-Length", str(len(document.content)))
        for name, value in (_HEADERS | dict(document.headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        content = memoryview(document.content)
        for start in range(0, len(content), _PIECE):
            self.wfile.write(content[start : start + _PIECE])  # each piece has the time limit

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _own_names() -> set[str]:
    """Return the names of this machine. Whole ones: anybody may own a domain that begins with its host name."""
    own = socket.gethostname().lower()
    return {own, f"{own.partition('.')[0]}.local", socket.getfqdn().lower()}


def listen(host: str, port: int | None, responder: Responder, *, flags: str = "--") -> PageServer:
    """Return a server, which answers once serve_forever() is called.

    port: 0 for any free one; None for FIRST_PORT or, if taken, one of the next, or any.
    flags: what the command's flags for host and port begin with, for errors.
    Raises UsageError for a host that is not of this machine, ResourceError for a port that is not available.
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"{host!r} is not an address of this machine", where=f"{flags}host", remedy=_HOSTS) from None
    address = str(found[0])
    names = frozenset() if is_loopback(address) else frozenset({host.lower(), *_own_names()})
    ports = [*range(FIRST_PORT, FIRST_PORT + PORTS), 0] if port is None else [port]
    for number in ports:
        try:
            return PageServer(family, (address, number), responder, names)
        except PermissionError:
            raise ResourceError(
                f"port {number} needs administrator rights",
                where=f"{flags}port",
                remedy=f"use a port from 1024 on, or leave {flags}port out: a free one is found",
            ) from None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                what = f"cannot listen at {host}: {error.strerror}"
                raise UsageError(what, where=f"{flags}host", remedy=_HOSTS) from None
    raise ResourceError(
        f"port {port} is taken by another program",
        where=f"{flags}port",
        remedy=f"use another port, or leave {flags}port out: a free one is found",
    )


def is_loopback(address: str) -> bool:
    """Return whether only programs on this machine reach an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def _connection_limits() -> tuple[int, float]:
    """Return the maximum number of connections, and the first descriptor reserved for others."""
    soft = -1 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft < 0:
        return MAX_CONNECTIONS, math.inf
    return max(1, min(MAX_CONNECTIONS, int(soft * _DESCRIPTOR_SHARE))), max(soft // 2, soft - RESERVED_DESCRIPTORS)


def _host_name(host: str) -> str:
    """Return the host of "host:port", without the brackets of an IPv6 address."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.removeprefix("[").removesuffix("]")


def _is_address(name: str) -> bool:
    """Return whether a host is an IP address, which, unlike a name, cannot be redirected."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_same_origin(origin: str, host: str) -> bool:
    """Return whether ``origin`` is the ``host`` that a request is addressed to, perhaps through a proxy."""
    scheme, _, place = origin.partition("://")
    return scheme in ("http", "https") and bool(host) and place.lower() == host.lower()
