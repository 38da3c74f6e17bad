"""Pages opened in a headless Chromium, driven by Playwright, and what went wrong in them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next((path for path in map(shutil.which, NAMES) if path), None)


def in_a_browser(test: Any) -> Any:
    """Marks a test that opens a page."""
    lacks = "" if CHROMIUM else "needs Chromium: apt-get install chromium"
    if not importlib.util.find_spec("playwright"):
        lacks = "needs playwright: pip install 'foresample[test]'"
    return pytest.mark.browser(pytest.mark.skipif(bool(lacks), reason=lacks)(test))


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of its own."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A page with a profile of its own; `settings` are those of Playwright's `new_page`."""

    def __init__(self, browser: Browser, width: int = 1280, height: int = 800, **settings: Any) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": height}, **settings)
        self.problems: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        self.requests: list[str] = []
        """Addresses that were requested, except data inside the page."""
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", self._note_message)
        self.page.on("request", self._note_request)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.problems.append(message.text)

    def _note_request(self, request: Request) -> None:
        if not request.url.startswith("data:"):
            self.requests.append(request.url)

    def drawn(self) -> dict[str, int]:
        """Number of series in every figure of the page; none has a broken coordinate."""
        assert not self.page.evaluate(
            "[...document.querySelectorAll('svg *')].some("
            "e => [...e.attributes].some(a => /NaN|undefined|Infinity/.test(a.value)))"
        )
        return self.page.evaluate(
            "Object.fromEntries([...document.querySelectorAll('figure.plot')].map("
            "f => [f.id, f.querySelectorAll('.canvas [data-series]').length]))"
        )


def data_of(text: str) -> dict[str, Any]:
    """The data of the page's script."""
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
