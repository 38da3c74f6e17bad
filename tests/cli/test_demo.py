"""`foresample demo`: it works in a browser, and is of this machine alone."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from foresample import pretrained
from foresample.cli.demo.server import DemoServer, read_numbers, serve
from foresample.cli.demo.shows import LIMITS, PEN, Send, Shows
from tests.browser import Browser, in_a_browser
from tests.cli.common import refuses
from tests.waiting import wait_for

DRAW = "/draw?window=4&steps=12&count=2&seed=0&label=1"
PLAN = "/plan?window=16&shape=1&plans=2&seed=0"


@pytest.fixture(scope="module")
def demo(folder: Path) -> Iterator[DemoServer]:
    with serve(Shows(pretrained.load(folder)), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
    thread.join()


def ask(demo: DemoServer, path: str, **headers: str) -> tuple[int, str]:
    """Status and body of one answer."""
    connection = http.client.HTTPConnection("127.0.0.1", demo.server_port, timeout=120)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


def events(body: str) -> list[dict[str, Any]]:
    return [json.loads(part.removeprefix("data: ")) for part in body.split("\n\n") if part]


# ------------------------------------------------------------------ this machine alone


def test_it_listens_on_the_loopback_only(demo: DemoServer) -> None:
    assert demo.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "example.org"},
        {"Host": "127.0.0.1"},  # another port's page
        {"Origin": "http://example.org"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
    ],
)
@pytest.mark.parametrize("path", ["/", DRAW])
def test_whoever_asks_from_elsewhere_is_refused(demo: DemoServer, headers: dict[str, str], path: str) -> None:
    status, body = ask(demo, path, **headers)
    assert (status, body) == (403, "This demo answers on its own machine only.")


def test_a_port_that_is_taken(demo: DemoServer, folder: Path) -> None:
    refuses("name another with --port", "demo", "--model", folder, "--no-browser", "--port", demo.server_port)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "abacus"], "--device takes cpu"),
        (["--port", "-1"], "--port"),
        (["--model", "none"], "none"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    refuses(sentence, "demo", "--no-browser", *arguments)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "window=4",
        "window=0&shape=0&seed=0&plans=1",
        "window=x&shape=0&seed=0&plans=1",
        "window=1e3&shape=0",
    ],
)
def test_numbers_it_does_not_take(demo: DemoServer, query: str) -> None:
    assert ask(demo, f"/plan?{query}")[0] == 400
    assert ask(demo, "/etc/passwd")[0] == 404


def test_numbers() -> None:
    assert read_numbers("window=8&steps=50&count=6&seed=0&label=-1", LIMITS)["label"] == -1
    with pytest.raises(ValueError, match="shape is a whole number from 0 to 3"):
        read_numbers("window=8&shape=4&seed=0&plans=1", PEN)


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "foresample",
        "demo",
        "--model",
        str(folder),
        "--port",
        "0",
        "--no-browser",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = process.stdout.readline()
        found = re.match(r"foresample demo: http://127\.0\.0\.1:(\d+)/ \(on this machine only", told)
        assert found, told
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=120)
        connection.request("GET", "/")
        assert "coat</option>" in connection.getresponse().read().decode()
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0


# ------------------------------------------------------------------ what it tells


def test_pictures_both_ways(demo: DemoServer) -> None:
    told = events(ask(demo, DRAW)[1])
    assert [event["kind"] for event in told[:2]] == ["waiting", "begin"]
    assert told[-1] == {"kind": "end"}
    done = {event["of"]: event for event in told if event["kind"] == "done"}
    assert done["sequential"]["calls"] == 12
    assert done["speculative"]["calls"] < 12
    rounds = [one for event in told if event.get("of") == "speculative" for one in event.get("rounds", [])]
    assert sum(committed for _, _, committed in rounds) == 12
    assert all(event["png"].startswith("data:image/png;base64,") for event in told if event["kind"] == "round")


def test_plans_both_ways(demo: DemoServer) -> None:
    told = [event for event in events(ask(demo, PLAN)[1]) if event["kind"] == "plan"]
    assert [event["of"] for event in told] == 2 * ["sequential", "speculative"]
    assert [event["calls"] for event in told if event["of"] == "sequential"] == [100, 100]
    assert max(event["calls"] for event in told if event["of"] == "speculative") < 60
    assert all(len(event["path"]) == 8 and event["ms"] > 0 for event in told)


def test_work_that_nobody_listens_to_ends(demo: DemoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one would wait for ever."""

    def endless(asked: object, send: Send) -> None:
        while True:
            send({"kind": "round"})

    with monkeypatch.context() as patch:
        patch.setattr(demo.shows, "draw", endless)
        with socket.create_connection(("127.0.0.1", demo.server_port)) as left:
            left.sendall(f"GET {DRAW} HTTP/1.1\r\nHost: 127.0.0.1:{demo.server_port}\r\n\r\n".encode())
            assert left.recv(100)
    assert events(ask(demo, PLAN)[1])[-1] == {"kind": "end"}


def test_closing_waits_for_work_and_not_for_browsers(demo: DemoServer) -> None:
    """No thread is left: an interpreter that ends under one at work may abort."""
    ended = threading.Event()
    before = set(threading.enumerate())

    def long(asked: object, send: Send) -> None:
        try:
            send({"kind": "round"})
            server.ending.wait()
            send({"kind": "round"})
        finally:
            ended.set()

    with serve(Shows(demo.shows.model), 0) as server:
        server.shows.draw = long  # type: ignore[method-assign]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = ("127.0.0.1", server.server_port)
        with socket.create_connection(address) as silent, socket.create_connection(address) as listening:
            listening.sendall(f"GET {DRAW} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
            assert listening.recv(100)
            wait_for(lambda: len(server.connected) == 2, "both connections")
            server.shutdown()
            server.server_close()
            assert ended.is_set()
            assert silent.recv(100) == b""
    thread.join()
    assert set(threading.enumerate()) <= before


def test_a_fault_is_told_and_the_demo_goes_on(demo: DemoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*given: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(demo.shows.policy, "predict_action_chunk", breaks)
        assert events(ask(demo, PLAN)[1])[-1] == {"kind": "fault", "text": "RuntimeError: out of luck"}
    assert events(ask(demo, PLAN)[1])[-1] == {"kind": "end"}


def test_a_model_of_no_pictures_is_refused() -> None:
    model = pretrained.Pretrained(
        torch.nn.Identity(), None, [], torch.Size([2]), torch.device("cpu"), torch.float32
    )
    with pytest.raises(ValueError, match="the demo shows pictures"):
        Shows(model)


# ------------------------------------------------------------------ in a browser


@in_a_browser
def test_the_page(demo: DemoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both pictures appear, the slider works, the pens move, no request leaves the machine."""
    connected, connect = [], socket.socket.connect

    def watched(self: socket.socket, address: Any) -> None:
        connected.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", watched)
    browser = Browser(seconds=90)
    try:
        browser.size(1280, 900)
        address = f"http://127.0.0.1:{demo.server_port}/"
        browser.open(address)
        shown = "[...document.querySelectorAll('#draw .side')]"
        shown += ".every(f => f.dataset.done && f.querySelector('img').naturalWidth)"
        browser.until(shown)
        assert "fewer calls one after another" in browser.run(
            "document.getElementById('draw-verdict').textContent"
        )
        assert browser.run("document.querySelectorAll('#rounds rect').length") > 3

        x, y, width = browser.run(
            "(r => [r.x, r.y + r.height / 2, r.width])(document.getElementById('window').getBoundingClientRect())"
        )
        browser.click(x + 0.75 * width, y)
        window = int(browser.run("document.getElementById('window-value').textContent"))
        assert 20 <= window <= 28
        browser.until(
            f"document.getElementById('draw-status').textContent.startsWith('Done, with window {window}.')"
        )
        assert browser.run(shown)
        assert any(f"draw?window={window}&" in request for request in browser.requests)

        browser.run("document.querySelector('#robot form').requestSubmit()")
        for name in ("sequential", "speculative"):
            browser.until(f"document.querySelectorAll('#pen-{name} dd').length == 4")
            assert browser.run(f"document.querySelector('#pen-{name} dd').textContent").endswith(" ms")
            browser.until(
                f"document.querySelector('#pen-{name} .path').getAttribute('points').split(' ').length > 8"
            )
        browser.size(390, 800, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390

        assert all(request.startswith(address) for request in browser.requests), browser.requests
        assert browser.problems == []
        outside = "new Promise(told => { addEventListener('securitypolicyviolation', e => told(e.blockedURI)); "
        outside += "fetch('http://192.0.2.1/').catch(() => 0); })"
        assert browser.run(outside).startswith("http://192.0.2.1")
    finally:
        browser.close()
    assert [address for address in connected if address[0] != "127.0.0.1"] == []
