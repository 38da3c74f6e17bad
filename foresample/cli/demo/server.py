"""The demo over HTTP, for this machine alone.

It listens on 127.0.0.1, and answers only requests made to that name: a page elsewhere whose name was made to lead here
(DNS rebinding), or that asks from its own origin, is refused. The page is told to fetch nothing from anywhere else
(Content-Security-Policy). Only the standard library is used; work is told as server-sent events, one piece at a time.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from string import Template
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from foresample.cli.demo.shows import LIMITS, PEN, Send, Shows
from foresample.provenance import __version__

POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class DemoServer(ThreadingHTTPServer):
    """Serves until it is told to stop; at most one piece of work at a time.

    Closing waits for all that is under way: an interpreter that ends under a thread at work may abort.
    """

    daemon_threads = False

    def __init__(self, shows: Shows, port: int) -> None:
        self.shows = shows
        self.working = threading.Lock()
        self.ending = threading.Event()
        self.connected: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.connected.add(request)
        with suppress(ConnectionError):  # whoever is gone need not be told
            if not self.ending.is_set():
                super().finish_request(request, client_address)
        self.connected.discard(request)

    def server_close(self) -> None:
        self.ending.set()  # whoever is at work stops at its next event,
        for connection in list(self.connected):  # and nobody waits for what a browser may still ask
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


def serve(shows: Shows, port: int) -> DemoServer:
    """A server that listens; a port that is taken is refused with the remedy."""
    try:
        return DemoServer(shows, port)
    except OSError as error:
        raise OSError(
            f"cannot listen on port {port} of this machine ({error.strerror}): name another with --port, or 0 for "
            "any that is free"
        ) from None


class Gone(Exception):
    """Nobody listens any more."""


class Handler(BaseHTTPRequestHandler):
    """GET / is the page; GET /draw and GET /plan do what their numbers ask for, and tell of it."""

    server: DemoServer
    server_version = "foresample"
    sys_version = ""

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        works: dict[str, tuple[Callable[[Mapping[str, int], Send], None], dict[str, tuple[int, int]]]] = {
            "/draw": (self.server.shows.draw, LIMITS),
            "/plan": (self.server.shows.plan, PEN),
        }
        if not self._from_here():
            self._answer("This demo answers on its own machine only.", HTTPStatus.FORBIDDEN, "text/plain")
        elif asked.path == "/":
            self._answer(page(self.server.shows.about()), HTTPStatus.OK, "text/html")
        elif asked.path in works:
            work, limits = works[asked.path]
            try:
                numbers = read_numbers(asked.query, limits)
            except ValueError as error:
                self._answer(str(error), HTTPStatus.BAD_REQUEST, "text/plain")
            else:
                self._tell(work, numbers)
        else:
            self._answer("There is nothing here.", HTTPStatus.NOT_FOUND, "text/plain")

    def _from_here(self) -> bool:
        port = self.server.server_port
        names = (f"127.0.0.1:{port}", f"localhost:{port}")
        origin = self.headers.get("Origin")
        return (
            self.headers.get("Host") in names
            and (origin is None or origin.removeprefix("http://") in names)
            and self.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
        )

    def _answer(self, text: str, status: HTTPStatus, kind: str) -> None:
        body = text.encode()
        self._head(status, kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cache-Control", "no-store")

    def _tell(self, work: Callable[[Mapping[str, int], Send], None], numbers: Mapping[str, int]) -> None:
        self._head(HTTPStatus.OK, "text/event-stream")
        self.end_headers()

        def send(event: dict[str, Any]) -> None:
            if self.server.ending.is_set():
                raise Gone
            try:
                self.wfile.write(f"data: {json.dumps(event, allow_nan=False)}\n\n".encode())
                self.wfile.flush()
            except OSError:
                raise Gone from None

        try:
            send({"kind": "waiting"})
            with self.server.working:  # whoever has it ends soon if nobody listens to it any more
                work(numbers, send)
            send({"kind": "end"})
        except Gone:
            pass
        except Exception as error:  # told where it is seen, and the demo goes on
            send({"kind": "fault", "text": f"{type(error).__name__}: {error}"})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the page says what there is to say."""


def read_numbers(query: str, limits: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Whole numbers within their limits, each named once; anything else is refused."""
    found = dict(parse_qsl(query, keep_blank_values=True))
    if set(found) != set(limits):
        raise ValueError(f"give {', '.join(limits)}, and nothing else")
    numbers = {}
    for name, (low, high) in limits.items():
        text = found[name]
        if len(text) > 12 or not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise ValueError(f"{name} is a whole number from {low} to {high}")
        numbers[name] = int(text)
    return numbers


def page(about: Mapping[str, Any]) -> str:
    """The page, everything inside one file."""
    here = files("foresample.cli.demo")
    options = {
        name: "".join(f'<option value="{i}">{escape(text)}</option>' for i, text in enumerate(about[name]))
        for name in ("labels", "shapes")
    }
    return Template((here / "page.html").read_text("utf-8")).substitute(
        options,
        style=(here / "page.css").read_text("utf-8"),
        script=(here / "page.js").read_text("utf-8"),
        device=escape(about["device"]),
        version=escape(__version__),
    )
