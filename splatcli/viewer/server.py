"""A few documents on a port of this machine for browsers to read; nothing else is answered, and no file is opened.

Pages from elsewhere that the same browser shows get none of them: a request has to be addressed to this machine (a site
whose name was pointed here says its own) and may not come from another origin, documents may not be shown elsewhere,
and what does something wants a header that only a page from here can send. The page itself is told to load nothing from
elsewhere.

Connections cannot starve the process that serves: their number is limited, the longest idle one gives way to a new one,
each has a few seconds to send a whole request, and some file descriptors are never given to any of them.
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

#: Where a port is looked for first; this many are tried.
FIRST_PORT, PORTS = 8080, 20

#: Connections that are open at once, at most; and the share of the process's file descriptors that they may take.
MAX_CONNECTIONS, _DESCRIPTOR_SHARE = 64, 0.25
#: File descriptors, of those that the process may have, that stay free for everything else: a save needs a few.
RESERVED_DESCRIPTORS = 64
#: Seconds in which a connection has to send a whole request, from its start or from the end of the last answer.
REQUEST_SECONDS = 10.0
#: Seconds in which a browser has to take a piece of an answer, and the bytes of one.
_WRITE_SECONDS, _PIECE = 60.0, 1 << 20
#: Seconds that a new connection waits for the one that gives way to it.
_GIVE_WAY = 1.0

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
class Response:
    """An answer: its media type and content; an HTTP status and more headers where those are not the usual ones."""

    kind: str
    content: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


#: Answers a request, or has nothing for it; called by several threads at once.
Responder = Callable[[Request], Response | None]


class PageServer(ThreadingHTTPServer):
    """Answers with what ``shelf`` has, from serve_forever() on until it is closed; made by listen()."""

    daemon_threads = True
    #: A port that another program listens on is busy; one that was just given up is not.
    allow_reuse_address = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        responder: Responder,
        names: frozenset[str] = frozenset(),
    ) -> None:
        """names: hosts that a request may be addressed to where others reach this server; addresses always may be."""
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
        """Where a browser on this machine finds the document "/"."""
        host, port = str(self.server_address[0]), self.server_address[1]
        if ipaddress.ip_address(host).is_unspecified:
            host = "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away in mid-answer is nobody's business."""

    def refusal(self, headers: Message) -> str | None:
        """Why a request with these headers is not answered; None when it is."""
        host = headers.get("Host", "")
        name = _host_name(host)
        if self.local and not is_loopback(name):
            return "This server answers to localhost only; --host makes it answer to others."
        if not (self.local or is_loopback(name) or _is_address(name) or self._is_own_name(name)):
            return "This server answers to its address, and to the name that --host gives it."
        if any(not _is_same_origin(origin, host) for origin in headers.get_all("Origin", [])):
            return "Pages of other sites get nothing from this server."
        # A link from elsewhere may lead here; what a page from elsewhere loads by itself may not.
        foreign = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if foreign and headers.get("Sec-Fetch-Mode") != "navigate":
            return "Pages of other sites get nothing from this server."
        return None

    def _is_own_name(self, name: str) -> bool:
        return name.lower() in self._names or name.lower().partition(".")[0] == socket.gethostname().lower()

    # Which connections there are. They are admitted by the thread of serve_forever(), and served by one each.

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.05)  # out of descriptors, most likely: it would be tried again at once
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a new connection is served: there is room for it, or the one that is idle for longest gives way."""
        with self._connections:
            limit, last = _connection_limits()
            if len(self._open) >= limit and self._waiting:
                self._drop(next(iter(self._waiting)))
                self._connections.wait_for(lambda: len(self._open) < limit, timeout=_GIVE_WAY)
            # The system gives the lowest number that is free.
            if len(self._open) >= limit or request.fileno() >= last:
                _log.debug("a connection is refused: %d are open", len(self._open))
                return False
            self._open.add(request)
        return True

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._connections:
            self._open.discard(request)
            self._waiting.pop(request, None)
            self._connections.notify_all()

    def service_actions(self) -> None:
        """Drops connections that have not sent a request in time, however slowly they are at it."""
        with self._connections:
            late = time.monotonic() - REQUEST_SECONDS
            for connection in [connection for connection, since in self._waiting.items() if since < late]:
                self._drop(connection)

    def awaits(self, connection: socket.socket) -> None:
        """From now on ``connection`` has to send a request."""
        with self._connections:
            self._waiting[connection] = time.monotonic()

    def has_come(self, connection: socket.socket) -> None:
        """A request has come in whole, and is being answered."""
        with self._connections:
            self._waiting.pop(connection, None)

    def _drop(self, connection: socket.socket) -> None:
        """Ends a connection that waits; its thread finds that nothing more comes, and closes it."""
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
        self.server.awaits(self.connection)
        super().handle_one_request()

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self.server.has_come(self.connection)
        return parsed

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self.close_connection = True  # with whatever it brings along: all that is asked for is in the path
        self._answer("POST")

    def _answer(self, method: str) -> None:
        if (reason := self.server.refusal(self.headers)) is not None:
            self.send_error(403, explain=reason)
            return
        place = urlsplit(self.path)
        document = self.server.responder(Request(method, place.path, dict(parse_qsl(place.query)), OWN in self.headers))
        if document is None:
            self.send_error(404)
            return
        self.send_response(document.status)
        self.send_header("Content-Type", document.kind)
        self.send_header("Content-Length", str(len(document.content)))
        for name, value in (_HEADERS | dict(document.headers)).items():
            self.send_header(name, value)
        self.end_headers()
        content = memoryview(document.content)
        for start in range(0, len(content), _PIECE):
            self.wfile.write(content[start : start + _PIECE])  # the time limit is that of one piece

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line."""


def listen(host: str, port: int | None, responder: Responder) -> PageServer:
    """A server that answers once serve_forever() is called on it.

    port: 0 is any free one; None is FIRST_PORT or, when that is taken, one of the next, or any.
    Raises UsageError for a host that is none of this machine's, ResourceError for a port that cannot be had.
    """
    try:
        family, _, _, _, found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError):
        raise UsageError(f"there is no address {host!r}", where="--host", remedy=_HOSTS) from None
    address = str(found[0])
    names = frozenset() if is_loopback(address) else frozenset({host.lower(), socket.getfqdn().lower()})
    ports = [*range(FIRST_PORT, FIRST_PORT + PORTS), 0] if port is None else [port]
    for number in ports:
        try:
            return PageServer(family, (address, number), responder, names)
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


def _connection_limits() -> tuple[int, float]:
    """How many connections may be open at once, and the first descriptor that none of them may have."""
    soft = -1 if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft < 0:
        return MAX_CONNECTIONS, math.inf
    return max(1, min(MAX_CONNECTIONS, int(soft * _DESCRIPTOR_SHARE))), max(soft // 2, soft - RESERVED_DESCRIPTORS)


def _host_name(host: str) -> str:
    """The host of "host:port", without the brackets of an IPv6 address."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    return name.removeprefix("[").removesuffix("]")


def _is_address(name: str) -> bool:
    """Whether it is a number and no name: nobody can point one at another machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether a page of ``origin`` came from the ``host`` that a request is addressed to, through a proxy perhaps."""
    scheme, _, place = origin.partition("://")
    return scheme in ("http", "https") and bool(host) and place.lower() == host.lower()
