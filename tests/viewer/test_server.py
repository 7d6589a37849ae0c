"""A page is served to this machine and to nobody else, and whatever browsers do to it."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from splatcli.errors import ResourceError, UsageError
from splatcli.viewer.http_server import FIRST_PORT, OWN, PageServer, Request, Response, is_loopback, listen


def responder(request: Request) -> Response | None:
    """The page, and what was asked for as a text."""
    if request.path == "/":
        return Response("text/html", b"page")
    if request.path == "/failing":
        raise MemoryError
    if request.path == "/large":
        return Response("text/plain", b"x" * 50_000_000)
    if request.path == "/echo":
        text = f"{request.method} {sorted(request.query.items())} {request.own}"
        return Response("text/plain", text.encode(), status=203, headers={"X-More": "yes"})
    return None


@pytest.fixture
def server() -> Iterator[PageServer]:
    with listen("127.0.0.1", 0, responder) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), content


def test_a_document_comes_with_its_type_and_with_no_leave_to_load_or_to_be_shown_elsewhere(
    server: PageServer,
) -> None:
    status, headers, content = ask(server, "/")
    assert (status, headers["Content-Type"], content) == (200, "text/html", b"page")
    assert "connect-src 'self' data: blob:;" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"


def test_a_request_is_handed_on_with_method_query_and_whether_our_own_page_asks(server: PageServer) -> None:
    status, headers, content = ask(server, "/echo?a=1&b=%20x", "POST", **{OWN: "1"})
    assert (status, headers["X-More"], content) == (203, "yes", b"POST [('a', '1'), ('b', ' x')] True")
    assert ask(server, "/echo")[2] == b"GET [] False"


def test_head_is_get_without_the_content(server: PageServer) -> None:
    of_get, of_head = (ask(server, "/", method) for method in ("GET", "HEAD"))
    assert (of_head[0], of_head[2]) == (200, b"")
    assert of_head[1]["Content-Length"] == of_get[1]["Content-Length"] == "4"
    assert ask(server, "/other", "HEAD")[0] == 404
    assert ask(server, "/", "HEAD", Host="evil.example")[0] == 403


def test_a_target_that_is_no_url_is_answered(server: PageServer) -> None:
    with socket.create_connection(server.server_address[:2], timeout=10) as connection:
        connection.sendall(b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_a_failure_is_answered_and_logged(server: PageServer, caplog: pytest.LogCaptureFixture) -> None:
    assert ask(server, "/failing")[0] == 500
    assert "/failing could not be served: MemoryError" in caplog.text
    assert ask(server, "/")[0] == 200


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/other", "GET", 404),
        ("/../../etc/passwd", "GET", 404),
        ("/%2e%2e/etc/passwd", "GET", 404),
        ("/", "DELETE", 501),
        ("/", "OPTIONS", 501),  # so no page from elsewhere may send our header
    ],
)
def test_nothing_else_is_answered(server: PageServer, path: str, method: str, status: int) -> None:
    assert ask(server, path, method)[0] == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8080", 200),  # through a tunnel the port may be another
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:1", 200),
        ("127.8.8.8", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("192.168.0.1:8080", 403),
        ("", 403),
        ("[", 403),
    ],
)
def test_a_request_must_be_addressed_to_this_machine(server: PageServer, host: str, status: int) -> None:
    assert ask(server, "/", Host=host)[0] == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("192.168.0.1:8080", 200),
        ("[fd00::1]:8080", 200),
        ("localhost", 200),
        (f"{socket.gethostname()}:80", 200),
        (f"{socket.gethostname().upper().partition('.')[0]}.local:80", 200),
        (f"{socket.gethostname()}.evil.example", 403),
        ("machine.example", 403),  # a name that its owner may have pointed here
        ("", 403),
    ],
)
def test_served_to_others_it_answers_to_addresses_and_its_own_names(host: str, status: int) -> None:
    with listen("0.0.0.0", 0, responder) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"
        assert ask(server, "/", Host=host)[0] == status
        server.shutdown()


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://localhost:8080"}, 200),
        ({"Origin": "https://LOCALHOST:8080"}, 200),  # through a proxy
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),  # another program of this machine
        ({"Origin": "http://localhost:8080.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ({"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),  # a link
    ],
)
def test_pages_of_other_origins_get_nothing(
    server: PageServer, method: str, headers: dict[str, str], status: int
) -> None:
    assert ask(server, "/", method, Host="localhost:8080", **headers)[0] == status


def test_of_too_many_connections_the_longest_idle_gives_way(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splatcli.viewer.http_server.MAX_CONNECTIONS", 4)
    idle = [socket.create_connection(("127.0.0.1", server.server_address[1])) for _ in range(30)]
    assert ask(server, "/")[0] == 200
    ended = []
    for connection in idle:
        connection.settimeout(0.5)
        try:
            ended.append(connection.recv(1) == b"")
        except TimeoutError:
            ended.append(False)
    assert ended[:27] == [True] * 27
    assert sum(ended) <= 28
    for connection in idle:
        connection.close()


def test_connections_never_get_the_last_descriptors(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splatcli.viewer.http_server._connection_limits", lambda: (64, 3.0))
    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        ask(server, "/")


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_request_that_comes_byte_by_byte_is_dropped(
    server: PageServer, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr("splatcli.viewer.http_server.REQUEST_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=0.05) as slow:
        slow.sendall(begin)
        for _ in range(400):  # generous: 20 s
            try:
                slow.sendall(b"X")
                if slow.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the connection is still open")
    assert ask(server, "/")[0] == 200


def test_an_answer_may_take_longer_than_the_limit_of_a_request(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splatcli.viewer.http_server.REQUEST_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as browser:
        browser.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        time.sleep(1.0)
        size = 0
        while piece := browser.recv(1 << 20):
            size += len(piece)
    assert size > 50_000_000


def test_a_browser_that_goes_away_in_mid_answer_is_not_worth_a_word(
    server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as browser:
        browser.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        browser.recv(100)
    with socket.create_connection(("127.0.0.1", server.server_address[1])) as browser:
        browser.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
        browser.recv(100)
    assert ask(server, "/")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_port_that_is_taken_is_refused_with_a_way_out_and_the_usual_one_has_successors() -> None:
    with listen("127.0.0.1", None, responder) as first, listen("127.0.0.1", None, responder) as second:
        taken = first.server_address[1]
        assert FIRST_PORT <= taken < second.server_address[1]
        with pytest.raises(ResourceError, match=f"port {taken} is taken") as caught:
            listen("127.0.0.1", taken, responder)
        assert "a free one is found" in str(caught.value.remedy)


def test_without_a_free_port_among_the_usual_ones_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splatcli.viewer.http_server.PORTS", 0)
    with listen("127.0.0.1", None, responder) as server:
        assert server.server_address[1] > 0


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.7", "a b", "", "x" * 300])
def test_an_address_of_no_interface_is_refused(host: str) -> None:
    with pytest.raises(UsageError) as caught:
        listen(host, 0, responder)
    assert caught.value.where == "--host"
    assert "127.0.0.1" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("", False)]
)
def test_which_addresses_only_this_machine_reaches(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
