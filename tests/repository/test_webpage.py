"""The page of one's own results (`foresample report`): what it says, and that it works in a browser."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foresample import webpage
from foresample.results import KINDS, Result, Results, parse_result
from foresample.webpage.sections import show
from tests.browser import Browser, data_of, in_a_browser, plots_of, values
from tests.saved import BENCH, CHECK, DATASET, FILES, LAW, RUN, SAMPLE, TUNE, save

WRONG: list[Any] = [None, "text", [], {}, 0, -1, True, 1e99, 1e-99]
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"
PNG = bytes.fromhex(  # one white pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63f80f00010101005a4d6ff10000000049454e44ae426082"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One result of each kind, with the pictures that commands paint."""
    folder = save(tmp_path_factory.mktemp("mine"), {**FILES, "letter.json": {"from": HOSTILE}})
    for name in ("a/run.png", "a/samples.png", "a/compare.png", "data/contact.png", "data/holiday.png"):
        (folder / name).write_bytes(PNG)
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    path = folder.parent / "new" / "report.html"
    webpage.write(path, folder)
    return path


def built(tmp_path: Path, *results: Any) -> str:
    return webpage.build(save(tmp_path, {f"{i}.json": data for i, data in enumerate(results)}))


def head(text: str) -> tuple[str, list[str]]:
    """The headline and the figures under it."""
    (headline,) = re.findall(r"<h1>(.*?)</h1>", text)
    return headline, re.findall(r"<li><a href=\"#[\w-]+\"><b>(.*?)</b>", text)


# ------------------------------------------------------------------ what it says


@pytest.mark.parametrize(
    ("result", "headline", "figures"),
    [
        (SAMPLE, "20.5 network calls a sample instead of 100", ["4.88×", "≈ 1.50×"]),
        (DATASET, "39 of 40 samples, 5.1 network calls a sample instead of 16", ["39 of 40", "1"]),
        (BENCH, "3.14× fewer network calls one after another", ["3.14×", "1.47×"]),
        (TUNE, "With 1 sample at a time, take window 8: 2.50× predicted, 2.25× achieved", ["2.25×"]),
        (CHECK, "Exact, as far as the tests see", ["exact", "p = 0.031"]),
    ],
)
def test_each_kind_has_its_own_headline(tmp_path: Path, result: Any, headline: str, figures: list[str]) -> None:
    text = built(tmp_path, result)
    assert head(text) == (headline, figures)
    assert re.findall(r'<section id="([\w-]+)"', text) == [f"{result['kind']}-0"]
    links = re.findall(r'href="#([\w-]+)"', text)
    assert all(f'id="{link}"' in text for link in links)


def test_where_the_sequential_sampler_wins_the_page_says_so(tmp_path: Path) -> None:
    slow = {**SAMPLE, "sequential": {"calls_mean": 100.0, "seconds": 0.5}}
    text = built(tmp_path / "slow", slow, {**TUNE, "window": None, "achieved": None})
    assert "<b>0.25×</b>" in text
    assert "4.00× slower" in text
    assert "Sample sequentially: with 1 sample at a time no window gains (the best comes to 2.50×)." in text
    lost = built(tmp_path / "lost", {**TUNE, "window": None, "achieved": 0.97})
    assert "no window gains (the best comes to 0.97×)." in lost  # as measured: 2.50× was a prediction
    assert head(lost)[1] == ["0.97×"]
    plain = {**SAMPLE, "speculative": {**RUN, "window": 0, "accepted_lengths": [6400], "mismatch": [None]}}
    text = built(tmp_path / "plain", plain)
    assert head(text) == ("64 samples, drawn sequentially", ["64"])
    assert "No window pays here" in text


def test_an_alarm_comes_first(tmp_path: Path) -> None:
    findings = [{**CHECK["findings"][1], "passed": False}]
    text = built(tmp_path / "check", SAMPLE, CHECK, {**CHECK, "findings": findings})
    headline, figures = head(text)
    assert headline == "The check of exactness failed"
    assert "not exact" in figures
    text = built(tmp_path / "law", SAMPLE, {**DATASET, "law": LAW})
    headline, figures = head(text)
    assert headline == "The law check of the dataset failed"
    assert figures[-1] == "p = 1e-09"
    assert "FAILED: 9 tests against 40 sequential samples" in text


def test_plots_show_the_numbers_of_their_file(page: Path) -> None:
    plots = plots_of(page.read_text())
    for method, shown in (("default", "default"), ("reflection-nearest", "reflection, nearest")):
        rows = [row for row in BENCH["rows"] if row["method"] == method]
        told = [(row["window"], row["speedup"], row["speedup_error"]) for row in rows]
        assert values(plots["bench-0-speedup"], shown) == told
    assert values(plots["tune-0-gain"], "gain") == [(4, 1.5, None), (8, 2.5, None)]
    assert values(plots["frontier-0-frontier"], "sequential") == [(30, 1 / 0.03, None), (240, 64 / 0.24, None)]
    assert [x for x, _, _ in values(plots["frontier-0-frontier"], "speculative")] == [16, 16 * 64**0.9]
    assert values(plots["sample-0-mismatch"], "mismatch") == [(2, 0.25, None), (3, 0.5, None)]
    assert [y for _, y, _ in values(plots["sample-0-kept"], "rounds")] == [n / 65 for n in (10, 20, 30, 5)]


def test_one_window_makes_dots_and_two_results_of_a_kind_two_sections(tmp_path: Path) -> None:
    single = {**BENCH, "rows": BENCH["rows"][:3]}
    text = built(tmp_path, single, BENCH)
    plots = plots_of(text)
    assert plots["bench-0-speedup"]["kind"] == "dots"
    assert plots["bench-0-speedup"]["categories"] == ["reflection, nearest", "somebody-elses", "default"]
    assert plots["bench-1-speedup"]["kind"] == "lines"
    assert ">Methods compared: 0</h2>" in text
    assert ">Methods compared: 1</h2>" in text


def test_pictures_beside_a_result_are_inside_the_page(page: Path) -> None:
    text = page.read_text()
    for name in ("compare.png", "samples.png", "run.png", "contact.png"):
        assert f"<code>{name}</code>" in text
    assert text.count("data:image/png;base64,") == 4
    assert "holiday" not in text


def test_every_source_stands_with_command_commit_versions_and_machine(page: Path) -> None:
    lines = re.findall(r"<li><b>(.*?)\.json</b>(.*?)</li>", page.read_text())
    assert [name for name, _ in lines] == [
        "a/report",
        *["data/manifest"] * 2,
        "mixture",
        "tune",
        "frontier",
        "check",
    ]
    for _, line in lines:
        for part in (
            "foresample something --seed 1",
            "commit 0123abc",
            "torch 2.7.0",
            "NVIDIA H200",
            "2 threads",
        ):
            assert part in line


def test_what_is_no_result_is_named(page: Path) -> None:
    assert "no results of foresample: letter.json." in page.read_text()


# ------------------------------------------------------------------ bad input


def hostile(value: Any) -> Any:
    """Every text in it, and every name of an entry, replaced; but for its kind and dtype, which are checked."""
    if isinstance(value, dict):
        return {key: value[key] if key in ("kind", "dtype") else hostile(value[key]) for key in value}
    if isinstance(value, list):
        return [hostile(part) for part in value]
    return HOSTILE if isinstance(value, str) else value


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    more = {"settings": {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    files = {f"{'<b>&' * i}{i}.json": hostile(data) for i, data in enumerate(FILES.values())}
    text = webpage.build(save(tmp_path, {**files, "more.json": {**CHECK, **more}}))
    assert "<img src=x" not in text
    assert "<b>&<" not in text
    assert text.count("</script>") == 2
    assert HOSTILE in json.dumps(data_of(text), ensure_ascii=False).replace('\\"', '"')


def test_a_text_that_cannot_be_encoded_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    webpage.write(out, save(tmp_path, {"x.json": {**CHECK, "command": "\ud800"}}))
    assert "<code>?</code>" in out.read_text(encoding="utf-8")


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a result; of lists the first two."""
    if at:
        yield at
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    )
    for key, part in inner:
        yield from places(part, (*at, key))


def test_whatever_a_field_holds_the_page_is_made_or_the_file_is_named() -> None:
    changes = [
        (data, at, wrong)
        for data in FILES.values()
        for at in places(data)
        if at != ("kind",)
        for wrong in WRONG
    ]
    made = 0
    for data, at, wrong in random.Random(0).sample(changes, 800):
        data = copy.deepcopy(data)
        inside: Any = data
        for key in at[:-1]:
            inside = inside[key]
        inside[at[-1]] = wrong
        result: Result | None = None
        refusal = ""
        try:
            result = parse_result(KINDS[str(data["kind"])], data, Path("x/y.json"))
        except webpage.ResultError as error:
            refusal = str(error)
        if result is None:
            assert refusal.startswith(f"x/y.json: {at[0]}")
            continue
        (shown,) = show(Results(Path("x"), [result], []))
        assert json.dumps([plot.to_json() for plot in shown.section.plots], allow_nan=False)
        assert shown.section.html()
        made += 1
    assert 100 < made < 700


def test_a_folder_without_results_writes_no_page(tmp_path: Path) -> None:
    with pytest.raises(webpage.ResultError, match="no result files in"):
        webpage.write(tmp_path / "page.html", tmp_path)
    assert not (tmp_path / "page.html").exists()


# ------------------------------------------------------------------ colours


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def palette(style: Path, scheme: str) -> dict[str, str]:
    block = style.read_text().split(":root {")[1 if scheme == "light" else 2].split("}")[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_good(scheme: str) -> None:
    colours = palette(Path(webpage.__file__).parent / "page.css", scheme)
    for ground in ("page", "panel", "wash"):
        for text in ("ink", "soft", "link", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in ("ours", "ref", *(f"c{i}" for i in range(8))):
        assert contrast(colours[mark], colours["panel"]) >= 3, mark
    assert contrast(colours["accent"], colours["accent-ink"]) >= 4.5


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@in_a_browser
@pytest.mark.parametrize("width", [360, 1280])
def test_it_loads_without_errors_requests_or_scrolling_sideways(
    browser: Browser, page: Path, width: int
) -> None:
    browser.size(width, mobile=width < 500)
    browser.open(page)
    assert browser.problems == []
    assert browser.requests == [page.resolve().as_uri()]
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("[...document.images].every(i => i.complete && i.naturalWidth > 0 && i.alt)")
    assert browser.drawn() == {name: len(plot["series"]) for name, plot in plots_of(page.read_text()).items()}


@in_a_browser
def test_hostile_texts_run_nowhere(browser: Browser, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    webpage.write(out, save(tmp_path, {name: hostile(data) for name, data in FILES.items()}))
    browser.open(out)
    assert browser.problems == []
    assert browser.run("document.querySelectorAll('img, [onerror]').length") == 0
    assert HOSTILE in browser.run("document.querySelector('#bench-0').innerText")
