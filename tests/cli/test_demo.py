"""`foresample demo`: one page that needs nothing else, with the numbers that were printed."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from foresample.checks.samples import SamplesLaw
from foresample.cli.demo import drawing
from tests.cli.common import invoke, refuses, succeeds
from tests.support.browser import Tab, chromium, data_of, in_a_browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A small demo: the page, and the lines printed."""
    out = tmp_path_factory.mktemp("demo") / "new" / "demo.html"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PLANS": 3, "STEPS": 8, "TURNS": 2, "CHECKED": 30}.items():
            patch.setattr(drawing, name, value)
        return out, succeeds("demo", "--out", out).splitlines()


def test_the_demo_prints_three_lines(written: tuple[Path, list[str]]) -> None:
    page, lines = written
    assert [line.split(":")[0] for line in lines] == ["robot", "picture", "check"]
    assert lines[2].endswith(f"; the page is {page}")
    assert "on this machine" in lines[0]
    assert "on this machine" in lines[1]
    assert lines[2].startswith("check:   passed, no difference between 30 sequential and 30 speculative plans")


def test_the_page_has_the_numbers_that_were_printed(written: tuple[Path, list[str]]) -> None:
    page, lines = written
    text = unescape(page.read_text("utf-8"))
    for line in lines:
        assert line.split(":", 1)[1].strip().removesuffix(f"; the page is {page}") in text
    for time in re.findall(r"[\d.]+ (?:ms|s)\b", lines[0])[-2:]:
        assert f"<dd>{time}</dd>" in text
    assert "{{" not in text


def test_the_page_is_self_contained(written: tuple[Path, list[str]]) -> None:
    text = written[0].read_text("utf-8")
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|url\(|@import|fetch\(|\bimport\b", text.split('id="data"')[0])
    assert re.findall(r'(?:src|href)="([^"]*)"', text) == ["data:,"]


def test_the_page_has_every_round(written: tuple[Path, list[str]]) -> None:
    data = data_of(written[0].read_text("utf-8"))
    rounds, frames = data["picture"]["rounds"], data["picture"]["frames"]
    assert sum(committed for _, _, committed in rounds) == 8
    assert [len(frames[0]), len(frames[1])] == [8, len(rounds)]
    assert all(frame.startswith("data:image/png;base64,") for side in frames for frame in side)
    assert [len(side["paths"]) for side in data["pens"]["sides"]] == [3, 3]
    assert all(ms > 0 for side in data["pens"]["sides"] for ms in side["ms"])


def test_a_failed_check_is_printed_and_the_command_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PLANS": 2, "STEPS": 4, "TURNS": 1}.items():
        monkeypatch.setattr(drawing, name, value)
    law = SamplesLaw(False, 9, 1e-9, "norm", 1e-3, 30, 30)
    monkeypatch.setattr(drawing, "check_plans", lambda *_: law)
    result = invoke("demo", "--out", tmp_path / "demo.html")
    assert result.exit_code == 1
    assert "check:   FAILED, there is a difference" in result.output


def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "draw_with_pens", lambda seed: pytest.fail("the work began"))
    (tmp_path / "file").touch()
    refuses("(File exists): name another file with --out", "demo", "--out", tmp_path / "file" / "demo.html")
    refuses("name another file with --out", "demo", "--out", tmp_path)


# ------------------------------------------------------------------ in a browser


@in_a_browser
def test_the_page_from_disk(written: tuple[Path, list[str]]) -> None:
    """Pens and pictures are drawn to their end, no error is logged, nothing is fetched."""
    with chromium() as browser:
        tab = Tab(browser, 1280, 900)
        page, uri = tab.page, written[0].resolve().as_uri()
        page.goto(uri)
        page.locator("body[data-pens][data-picture]").wait_for()
        for name in ("sequential", "speculative"):
            points = page.locator(f"#pen-{name} polyline").first.get_attribute("points") or ""
            assert len(points.split()) == 1 + 3 * 8
            assert page.locator(f"#picture-{name} img").evaluate("image => image.naturalWidth") > 0
        rounds = len(data_of(written[0].read_text("utf-8"))["picture"]["rounds"])
        assert page.locator("#rounds rect").count() >= rounds
        tab.drawn()
        page.evaluate("document.getElementById('play-pens').click()")
        assert not page.evaluate("document.body.dataset.pens")
        page.locator("body[data-pens]").wait_for()
        assert tab.problems == []
        assert tab.requests == [uri]
        phone = Tab(browser, 390, is_mobile=True)
        phone.page.goto(uri)
        assert phone.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert phone.problems == []
