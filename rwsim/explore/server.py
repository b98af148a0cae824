"""The page's own server: standard library, loopback only, one page, one simulation at a time.

What a browser sends on behalf of another site is refused: a foreign Host (DNS rebinding), a foreign Origin, a cross-site fetch; a
simulation also needs the token that the page was given at this start.
"""

import html
import json
import re
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rwsim.errors import InvalidArgument, RwsimError

ADDRESS = "127.0.0.1"
# Of a request's body, in bytes: a setting takes some hundred.
LARGEST_BODY = 4096
# Seconds that a connection may keep silent.
_PATIENCE = 15
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_NOTHING = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
TOKEN_HEADER, PLACE = "X-Rwsim-Token", "/simulate"


class Refused(Exception):
    """A request that is not answered; `status` says how."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Server(ThreadingHTTPServer):
    """The server; `render(token)` gives the page, `answer(setting)` simulates.

    Raises:
        InvalidArgument: A port that is taken or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, render: Callable[[str], str], answer: Callable[[Any], dict[str, Any]]) -> None:
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidArgument("port", f"cannot be used ({reason})", port, "give another with --port, or 0 for any free one") from None
        self.answer, self.token, self.busy = answer, secrets.token_urlsafe(24), threading.Lock()
        self.hosts = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")} | (
            {ADDRESS, "localhost"} if self.server_port == 80 else set()
        )
        self.page = render(self.token).encode()
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', self.page.decode())
        self.policy = f"{html.unescape(policy[1])}; frame-ancestors 'none'" if policy else _NOTHING

    @property
    def address(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is no error of ours."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page and POST of a simulation; all else is 404 or 405."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rwsim", ""
    timeout = _PATIENCE

    def do_GET(self) -> None:
        self._guarded(self._page)

    def do_HEAD(self) -> None:
        self._guarded(self._page)

    def do_POST(self) -> None:
        self._guarded(self._simulate)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            self._check_sender()
            act()
        except Refused as refused:
            self._refuse(refused.status, str(refused))

    def _check_sender(self) -> None:
        if self.headers.get_all("Host", []) not in ([host] for host in self.server.hosts):
            raise Refused(403, "this server answers to its own address only")
        origins = self.headers.get_all("Origin", [])
        if origins and origins not in ([f"http://{host}"] for host in self.server.hosts):
            raise Refused(403, "a request from another site")
        site = self.headers.get("Sec-Fetch-Site", "none")
        # A link from elsewhere may open the page; nothing of it may be fetched into another one.
        opened = (
            self.command == "GET" and self.headers.get("Sec-Fetch-Mode") == "navigate" and self.headers.get("Sec-Fetch-Dest") == "document"
        )
        if site not in ("same-origin", "none") and not opened:
            raise Refused(403, "a request from another site")

    def _page(self) -> None:
        if self.path.partition("?")[0] != "/":
            raise Refused(404, "there is nothing here")
        self._send(200, "text/html; charset=utf-8", self.server.page, self.server.policy)

    def _simulate(self) -> None:
        if self.path != PLACE:
            raise Refused(404, "there is nothing here")
        if not self.headers.get("Origin"):
            raise Refused(403, "a simulation needs an Origin")
        if not secrets.compare_digest(self.headers.get(TOKEN_HEADER, "").encode(), self.server.token.encode()):
            raise Refused(403, "the token is not that of this start: reload the page")
        if self.headers.get("Content-Type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, "the body must be application/json")
        given = _parsed(self._body())
        if not self.server.busy.acquire(blocking=False):
            raise Refused(429, "a simulation is running: wait for its end")
        try:
            found = json.dumps(self.server.answer(given), allow_nan=False)
        except InvalidArgument as error:
            raise Refused(400, str(error)) from None
        except RwsimError as error:
            raise Refused(422, str(error)) from None
        except Exception as error:  # the server goes on, and the page says what went wrong
            raise Refused(500, f"internal error: {type(error).__name__}: {error}") from None
        finally:
            self.server.busy.release()
        self._send(200, "application/json", found.encode())

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if self.headers.get("Transfer-Encoding") or len(lengths) != 1 or not re.fullmatch(r"[0-9]{1,9}", lengths[0]):
            raise Refused(411, "the body's length must be given")
        if int(lengths[0]) > LARGEST_BODY:
            raise Refused(413, f"the body must be at most {LARGEST_BODY} bytes")
        body = self.rfile.read(int(lengths[0]))
        if len(body) < int(lengths[0]):
            raise Refused(400, "the body is shorter than it says")
        return body

    def _refuse(self, status: int, message: str) -> None:
        # What is left of a body that was not read must not be taken for the next request.
        self.close_connection = True
        self._send(status, "application/json", json.dumps({"error": message}).encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself: unknown methods, broken requests."""
        self._refuse(405 if code == 501 else int(code), message or "the request was not understood")

    def _send(self, status: int, kind: str, body: bytes, policy: str = _NOTHING) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Security-Policy": policy, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        if status == 405:
            self.send_header("Allow", "GET, HEAD, POST")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the address is the one line that this command prints."""


def _parsed(body: bytes) -> Any:
    def refuse(name: str) -> Any:
        raise Refused(400, f"{name} is no number of JSON")

    try:
        return json.loads(body.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        raise Refused(400, "the body must be JSON") from None
