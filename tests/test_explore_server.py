"""The explorer's server by raw sockets on loopback, and the command."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from rwsim.cli import run
from rwsim.errors import InvalidArgument, RwsimError
from rwsim.explore.server import LARGEST_BODY, Server
from rwsim.page.document import page


class Service:
    """A server in a thread, with a small page and an answer that a test chooses."""

    def __init__(self):
        self.asked, self.answer = [], lambda given: {"ok": True}
        self.server = Server(0, lambda token: page("a page", f"token {token}", script="1", connect=True), self._answer)
        self.port, self.token = self.server.server_port, self.server.token
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()

    def _answer(self, given):
        self.asked.append(given)
        return self.answer(given)

    def raw(self, data: bytes, timeout=10):
        """All that comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            pieces = []
            while piece := connection.recv(65536):
                pieces.append(piece)
        return b"".join(pieces)

    def ask(self, method="GET", path="/", body=b"", drop=(), **headers):
        """(status, headers by lower-case name, body) of one request; a header of None is left out."""
        own = {"Host": f"127.0.0.1:{self.port}", "Connection": "close"}
        if method == "POST":
            own |= {"Origin": f"http://127.0.0.1:{self.port}", "Content-Type": "application/json", "X-Rwsim-Token": self.token}
            own |= {"Content-Length": str(len(body))}
        sent = {**own, **{name.replace("_", "-"): value for name, value in headers.items()}}
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in sent.items() if v is not None)]
        return self.parsed(self.raw("\r\n".join([*lines, "", ""]).encode("latin-1") + body))

    @staticmethod
    def parsed(answer):
        head, _, rest = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        return int(first.split()[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}, rest

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def service():
    one = Service()
    yield one
    one.close()


def test_serves_its_page_and_no_more(service):
    status, headers, body = service.ask()
    assert status == 200 and service.token.encode() in body and headers["content-type"] == "text/html; charset=utf-8"
    assert (
        headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY" and headers["cache-control"] == "no-store"
    )
    policy = headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy and "connect-src 'self'" in policy
    )
    status, headers, body = service.ask("HEAD")
    assert status == 200 and body == b"" and int(headers["content-length"]) > 100
    for path in ("/index.html", "/simulate", "/..", "/../etc/passwd", "/%2e%2e/etc/passwd", "//etc/passwd", "/static/", "/.git/config",
                 "/\\..\\x", "http://127.0.0.1/", "/x" * 3000, "*"):  # fmt: skip
        status, headers, body = service.ask(path=path)
        assert status == 404 and b"root:" not in body and headers["x-content-type-options"] == "nosniff", path


def test_listens_on_loopback_only(service):
    assert service.server.server_address[0] == "127.0.0.1" and service.server.address.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", "[::1]:{port}"]
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
def test_refuses_a_foreign_host(service, host, method):
    """DNS rebinding: a name of another site that leads here."""
    status, _, body = service.ask(method, "/simulate" if method == "POST" else "/", Host=host and host.format(port=service.port))
    assert status == 403 and service.token.encode() not in body and not service.asked


def test_refuses_two_hosts(service):
    own = f"Host: 127.0.0.1:{service.port}\r\n"
    answer = service.raw(f"GET / HTTP/1.1\r\n{own}Host: evil.example\r\nConnection: close\r\n\r\n".encode())
    assert service.parsed(answer)[0] == 403


def test_knows_itself_by_both_names(service):
    assert service.ask(Host=f"localhost:{service.port}")[0] == 200
    assert service.ask("POST", "/simulate", b"{}", Host=f"localhost:{service.port}", Origin=f"http://localhost:{service.port}")[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1", "http://127.0.0.1:{port}.evil.example", ""]
)
def test_refuses_a_foreign_origin(service, origin):
    status, _, _ = service.ask("POST", "/simulate", b"{}", Origin=origin.format(port=service.port))
    assert status == 403 and not service.asked
    if origin:
        assert service.ask(Origin=origin.format(port=service.port))[0] == 403


def test_a_simulation_needs_an_origin(service):
    assert service.ask("POST", "/simulate", b"{}", Origin=None)[0] == 403 and not service.asked


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_refuses_fetches_of_other_sites(service, site):
    assert service.ask("POST", "/simulate", b"{}", Sec_Fetch_Site=site)[0] == 403
    assert service.ask(Sec_Fetch_Site=site)[0] == 403
    assert service.ask(Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="iframe")[0] == 403
    # A link that somebody sent opens the page.
    assert service.ask(Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate", Sec_Fetch_Dest="document")[0] == 200
    assert service.ask("POST", "/simulate", b"{}", Sec_Fetch_Site="same-origin")[0] == 200
    assert len(service.asked) == 1


@pytest.mark.parametrize("token", [None, "", "x", "é"])
def test_a_simulation_needs_the_token(service, token):
    assert service.ask("POST", "/simulate", b"{}", X_Rwsim_Token=token)[0] == 403 and not service.asked


def test_every_start_has_its_own_token(service):
    other = Service()
    try:
        assert other.token != service.token and len(service.token) >= 32
        assert service.ask("POST", "/simulate", b"{}", X_Rwsim_Token=other.token)[0] == 403
    finally:
        other.close()


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonx"])
def test_takes_json_only(service, kind):
    assert service.ask("POST", "/simulate", b"{}", Content_Type=kind)[0] == 415 and not service.asked


@pytest.mark.parametrize(
    "body", [b"", b"{", b"NaN", b'{"lr": NaN}', b'{"lr": Infinity}', b'{"lr": -Infinity}', b"\xff\xfe", b"[" * 4000, b"{} {}"]
)
def test_refuses_what_is_not_json(service, body):
    status, headers, said = service.ask("POST", "/simulate", body)
    assert status == 400 and "error" in json.loads(said) and headers["content-type"] == "application/json" and not service.asked


def test_numbers_out_of_range_reach_the_check_as_they_are(service):
    from rwsim.explore.setting import check

    service.answer = lambda given: {"rule": repr(check(given).rule)}
    for body in (b'{"lr": 1e999}', b'{"lr": ' + b"9" * 3000 + b"}", b"[]", b"1", b"null"):
        status, _, said = service.ask("POST", "/simulate", body)
        assert status == 400 and "must" in json.loads(said)["error"]


@pytest.mark.parametrize(
    ("length", "status"),
    [(None, 411), ("-1", 411), ("1e3", 411), ("+5", 411), (str(LARGEST_BODY + 1), 413), ("999999999999", 411), ("99999999", 413)],
)
def test_bounds_the_body(service, length, status):
    assert service.ask("POST", "/simulate", b"{}", Content_Length=length)[0] == status and not service.asked


def test_takes_no_chunks_and_no_second_length(service):
    assert service.ask("POST", "/simulate", b"2\r\n{}\r\n0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked")[0] == 411
    own = f"127.0.0.1:{service.port}"
    head = f"Host: {own}\r\nOrigin: http://{own}\r\nX-Rwsim-Token: {service.token}\r\nContent-Type: application/json"
    answer = service.raw(f"POST /simulate HTTP/1.1\r\n{head}\r\nContent-Length: 2\r\nContent-Length: 20\r\n\r\n{{}}".encode())
    assert service.parsed(answer)[0] == 411
    assert service.ask("POST", "/simulate", b"{}", Content_Length="20")[0] == 400  # less than it says
    assert not service.asked


def test_a_refused_body_is_not_the_next_request(service):
    """Nothing that a request smuggles behind its head is taken for a request."""
    inner = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{service.port}\r\n\r\n"
    head = f"POST /simulate HTTP/1.1\r\nHost: evil.example\r\nContent-Length: {len(inner)}\r\n\r\n"
    answer = service.raw((head + inner).encode())
    assert answer.count(b"HTTP/1.1") == 1 and service.parsed(answer)[0] == 403


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get"])
def test_refuses_other_methods(service, method):
    status, headers, body = service.ask(method)
    assert status == 405 and headers["x-content-type-options"] == "nosniff" and "<" not in body.decode() and not service.asked
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "data",
    [b"\r\n", b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n"],
)
def test_broken_requests_end(service, data):
    service.raw(data)
    assert service.ask()[0] == 200 and not service.asked


def test_a_post_elsewhere_is_nothing(service):
    for path in ("/", "/simulate/", "/simulate?x", "/../simulate"):
        assert service.ask("POST", path, b"{}")[0] == 404
    assert not service.asked


def test_one_simulation_at_a_time(service):
    inside, leave = threading.Event(), threading.Event()

    def slow(given):
        inside.set()
        assert leave.wait(30)
        return {"ok": True}

    service.answer = slow
    first = []
    thread = threading.Thread(target=lambda: first.append(service.ask("POST", "/simulate", b"{}")))
    thread.start()
    assert inside.wait(30)
    status, _, said = service.ask("POST", "/simulate", b"{}")
    assert status == 429 and "running" in json.loads(said)["error"]
    assert service.ask()[0] == 200  # the page is there meanwhile
    leave.set()
    thread.join(30)
    assert first[0][0] == 200 and len(service.asked) == 1
    service.answer = lambda given: {"again": True}
    assert service.ask("POST", "/simulate", b"{}")[0] == 200


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidArgument("lr", "must be more", "<b>"), 400), (RwsimError("no"), 422), (RuntimeError("x"), 500)]
)
def test_errors_are_said_and_the_server_goes_on(service, error, status):
    def fail(given):
        raise error

    service.answer = fail
    for _ in range(2):
        found, headers, said = service.ask("POST", "/simulate", b"{}")
        assert found == status and str(error) in json.loads(said)["error"] and headers["content-type"] == "application/json"


def test_a_point_is_simulated(service):
    from rwsim.explore.setting import check
    from rwsim.explore.simulate import simulate
    from tests.test_explore import SETTING

    service.answer = lambda given: simulate(check(given))
    status, _, said = service.ask("POST", "/simulate", json.dumps({**SETTING, "steps": 60}).encode())
    found = json.loads(said)
    assert status == 200 and found["points"]["step"][0] == 1 and len(found["full"]["norm"]) > 50
    status, _, said = service.ask("POST", "/simulate", json.dumps({**SETTING, "steps": 100_000, "fan_in": 16384}).encode())
    assert status == 400 and "at most" in json.loads(said)["error"]


def test_a_busy_port_is_one_line(service, capsys):
    assert run(["explore", "--port", str(service.port), "--no-browser"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and f"{service.port}" in printed.err and "--port" in printed.err


@pytest.mark.parametrize("port", ["-1", "65536", "x", "1.5"])
def test_refuses_a_port(port, capsys):
    assert run(["explore", "--port", port, "--no-browser"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_writes_a_file(tmp_path, capsys):
    target = tmp_path / "new" / "explore.html"
    assert run(["explore", "--static", str(target)]) == 0
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>") and capsys.readouterr().out == f"Written to {target}\n"
    assert run(["explore", "--static", str(tmp_path)]) == 2
    assert "must be a file" in capsys.readouterr().err


def test_ctrl_c_ends_it():
    command = [sys.executable, "-m", "rwsim.cli", "explore", "--port", "0", "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": "false"}
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert line.startswith("http://127.0.0.1:") and out == "" and process.returncode == 3
    assert err == "rwsim: error: interrupted\n"
