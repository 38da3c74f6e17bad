"""A headless Chromium, driven over its debugging pipe with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """The browser's path, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def in_a_browser(test: Any) -> Any:
    """Marks a test that opens a page."""
    reason = "needs Chromium: apt-get install chromium"
    return pytest.mark.browser(pytest.mark.skipif(find_chromium() is None, reason=reason)(test))


def data_of(text: str) -> dict[str, Any]:
    """What the page's script is given."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found
    return json.loads(found[1])


def plots_of(text: str) -> dict[str, dict[str, Any]]:
    """The plots of a page by their ids."""
    return {plot["id"]: plot for plot in data_of(text)["plots"]}


def values(plot: dict[str, Any], series: str) -> list[tuple[Any, float, float | None]]:
    """(x, y, error) of every point of a series."""
    (found,) = [s for s in plot["series"] if s["name"] == series]
    return [(point["x"], point["y"], point["error"]) for point in found["points"]]


class Browser:
    """One browser with one tab. Messages are JSON objects that end in a zero byte, on descriptors 3 and 4."""

    def __init__(self, seconds: float = 30.0) -> None:
        self.seconds = seconds
        self.folder = tempfile.mkdtemp()
        ours, theirs = os.pipe(), os.pipe()
        self._write, self._read = ours[1], theirs[0]
        flags = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
        flags += " --no-first-run --disable-background-networking --disable-dev-shm-usage"
        command = f'exec "$0" {flags} --user-data-dir="$1" about:blank 3<&{ours[0]} 4>&{theirs[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, find_chromium() or "chromium", self.folder],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._buffer, self._next = b"", 0
        self.session: str | None = None
        self.problems: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        self.requests: list[str] = []
        """Everything that was fetched but for data inside the page."""
        try:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.seconds
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def wait(self, event: str) -> dict[str, Any]:
        """The next event of this name."""
        until = time.monotonic() + self.seconds
        while True:
            answer = self._receive(until)
            self._note(answer)
            if answer.get("method") == event:
                return answer["params"]

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._read, 1 << 20) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"].get("exception", told)))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(str(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith("data:"):
            self.requests.append(told["request"]["url"])

    def size(self, width: int, height: int = 800, *, mobile: bool = False) -> None:
        """Of the screen."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    def media(self, **features: str) -> None:
        """For instance prefers_color_scheme="dark"."""
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", features=told)

    def open(self, page: Path | str) -> None:
        """Load a file or an address, forgetting the problems and requests of the last one."""
        self.problems, self.requests = [], []
        self.send("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait("Page.loadEventFired")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        told = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(str(told["exceptionDetails"]))
        return told["result"].get("value")

    def until(self, condition: str) -> Any:
        """The value of a JavaScript expression, once it is true."""
        end = time.monotonic() + self.seconds
        while not (value := self.run(condition)):
            if time.monotonic() > end:
                raise TimeoutError(f"it does not come true: {condition}")
            self.run("new Promise(done => setTimeout(done, 50))")
        return value

    def drawn(self) -> dict[str, int]:
        """How many series every figure of the page shows; none of them with a broken coordinate."""
        assert not self.run(
            "[...document.querySelectorAll('svg *')].some("
            "e => [...e.attributes].some(a => /NaN|undefined|Infinity/.test(a.value)))"
        )
        return self.run(
            "Object.fromEntries([...document.querySelectorAll('figure.plot')].map("
            "f => [f.id, f.querySelectorAll('.canvas [data-series]').length]))"
        )

    def move_mouse(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page."""
        told = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def pdf(self) -> bytes:
        """The page as printed on A4."""
        told = self.send("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)
        return base64.b64decode(told["data"])

    def close(self) -> None:
        """End the browser and everything it started."""
        for descriptor in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
