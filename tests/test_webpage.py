"""The report page: what it says, and what it does in a real browser."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import foresample as fs
from foresample import webpage
from foresample.cli import app
from foresample.webpage import evidence, recording
from foresample.webpage.results import Results, read_results
from foresample.webpage.sections import headlines, sections
from tests import reference, test_law
from tests.browser import Browser, find_chromium

FILES = sorted(path.relative_to(webpage.RESULTS) for path in webpage.RESULTS.rglob("*.json"))
CURVES = {
    "command": "curves.py",
    "commit": "0123abc",
    "versions": {"foresample": "0.1.0"},
    "machine": {"cpu": "x86_64", "threads": 1, "gpu": None},
    "settings": {"target": "a mixture", "steps": 30},
    "rows": [
        {
            "method": method,
            "exact": exact,
            "states": states,
            "calls": 30 / speedup,
            "calls_error": 0.1,
            "evaluations": 90.0,
            "seconds": 1.0,
            "speedup": speedup,
            "speedup_error": error,
        }
        for method, exact, states, speedup, error in (
            ("foresample", True, 5, 2.5, 0.02),
            ("foresample", True, 20, 3.5, 0.03),
            ("Picard", False, 5, 2.0, None),
            ("</script><img src=x onerror=alert(1)>", True, 5, 1.5, 0.01),
        )
    ],
}
QUALITY = {
    "settings": {"target": "a mixture"},
    "rows": [
        {"method": "foresample", "exact": True, "calls": 12.0, "distance": 0.01},
        {"method": "fewer steps", "exact": False, "calls": 12.0, "distance": 0.2},
        {"method": "fewer steps", "exact": False, "calls": 6.0, "distance": 0.4},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The saved results, and one of each kind that is written elsewhere."""
    folder = tmp_path_factory.mktemp("results") / "results"
    shutil.copytree(webpage.RESULTS, folder)
    (folder / "curves-mixture.json").write_text(json.dumps(CURVES))
    (folder / "quality-cost-mixture.json").write_text(json.dumps(QUALITY))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    path = folder.parent / "report.html"
    webpage.write(path, folder)
    return path


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert found
    return json.loads(found[1])


def plots_of(text: str) -> dict[str, dict[str, Any]]:
    return {plot["id"]: plot for plot in data_of(text)["plots"]}


def values(plot: dict[str, Any], series: str) -> list[tuple[Any, float, float | None]]:
    (found,) = [s for s in plot["series"] if s["name"] == series]
    return [(point["x"], point["y"], point["error"]) for point in found["points"]]


def saved(name: str) -> dict[str, Any]:
    return json.loads((webpage.RESULTS / f"{name}.json").read_text())


# ------------------------------------------------------------------ what it says


@pytest.mark.parametrize(
    ("name", "x", "y", "error"),
    [
        ("mixture-d500-T30-v", "window", "speedup", "speedup_error"),
        ("cifar10-calls-w50", "steps", "speedup", "speedup_error"),
        ("fashion_mnist-calls-w50", "steps", "speedup", "speedup_error"),
    ],
)
def test_plots_show_the_numbers_of_their_file(page: Path, name: str, x: str, y: str, error: str) -> None:
    plot, rows = plots_of(page.read_text())[f"plot-{name}"], saved(name)["rows"]
    assert {s["name"] for s in plot["series"]} == {row["method"] for row in rows}
    for method in {row["method"] for row in rows}:
        told = sorted((row[x], row[y], row[error]) for row in rows if row["method"] == method)
        assert values(plot, method) == told


def test_clock_growth_and_losses_show_the_numbers_of_their_files(page: Path) -> None:
    plots = plots_of(page.read_text())
    for steps in (100, 250, 1000):
        rows = [r for r in saved("cifar10-latency-graph")["rows"] if r["steps"] == steps]
        shown = values(plots["plot-cifar10-latency-graph"], f"{steps} steps")
        assert shown == [(r["window"], r["ms"], r["ms_error"]) for r in rows]
    growth = saved("cifar10-growth")
    shown = values(plots["plot-cifar10-growth"], "measured")
    assert shown == [(r["steps"], r["calls"], r["calls_error"]) for r in growth["rows"]]
    assert f"fitted exponent is {growth['exponent']:.2f}" in page.read_text()
    rows = saved("cifar10-throughput")["rows"]
    shown = values(plots["plot-cifar10-throughput"], "sequential")
    assert shown == [(f"{row['steps']} steps", row["sequential_samples_per_second"], None) for row in rows]
    for row in saved("cifar10-latency-graph")["rounds"]:
        name = f"window {row['window']}" if row["window"] else "sequential"
        parts = [values(plots["plot-rounds"], s["name"]) for s in plots["plot-rounds"]["series"]]
        total = sum(y for part in parts for x, y, _ in part if x == name)
        assert total == pytest.approx(row["round_us"])


def test_the_head_has_the_best_figures_and_the_worst(page: Path) -> None:
    text = page.read_text()
    (ours,) = [
        r
        for r in saved("cifar10-calls-w50")["rows"]
        if r["steps"] == 1000 and r["method"] == "default, x0 reused"
    ]
    assert f"<b>{ours['speedup']:.1f}×</b>" in text
    rows = saved("cifar10-throughput")["rows"]
    share = min(row["samples_per_second"] / row["sequential_samples_per_second"] for row in rows)
    assert f"<b>{share:.2f}×</b>" in text


def test_curves_and_quality_cost_files_are_shown(page: Path) -> None:
    plots = plots_of(page.read_text())
    curves = plots["plot-curves-mixture"]
    assert values(curves, "foresample") == [(5, 2.5, 0.02), (20, 3.5, 0.03)]
    assert [s["role"] for s in curves["series"]] == ["ours", "inexact", "exact"]
    quality = plots["plot-quality-cost-mixture"]
    assert values(quality, "fewer steps") == [(6.0, 0.4, None), (12.0, 0.2, None)]


def test_the_tests_on_a_gpu_are_told(page: Path) -> None:
    gpu = saved("gpu-tests")
    assert f"{len(gpu['passed'])} tests passed, {len(gpu['failed'])} failed" in page.read_text()


def test_every_source_stands_with_command_commit_versions_and_machine(page: Path) -> None:
    text = page.read_text()
    for name in ("cifar10-growth", "published", "check-embedded", "policy-lasa"):
        origin = saved(name)
        (line,) = set(re.findall(rf"<li><b>{name}\.json</b>.*?</li>", text))
        for part in (
            origin["command"],
            origin["commit"],
            origin["versions"]["torch"],
            origin["machine"]["cpu"],
        ):
            assert part in line


def test_nothing_is_fetched(page: Path) -> None:
    text = page.read_text()
    sources = re.findall(r"""\b(?:src|href|action|poster|srcset)\s*=\s*["']?([^"'\s>]+)""", text)
    markup = [s for s in sources if "onerror" not in s]
    assert markup
    assert all(s.startswith(("data:", "#", "x")) for s in markup)
    assert "@import" not in text
    assert not re.search(r"url\((?!data:)", text)
    assert text.count("<img src=x") == 0
    assert "default-src 'none'" in text


@pytest.mark.parametrize("missing", FILES, ids=str)
def test_a_missing_file_breaks_nothing(folder: Path, tmp_path: Path, missing: Path) -> None:
    few = tmp_path / "few"
    shutil.copytree(folder, few)
    (few / missing).unlink()
    text = webpage.build(few)
    assert f"<b>{missing.with_suffix('')}.json</b>" not in text


@pytest.mark.parametrize(
    ("file", "sections"),
    [
        ("cifar10-growth", ["growth"]),
        ("published", ["published"]),
        ("gpu-tests", ["exactness"]),
        ("mixture-d64-T300-v", ["calls"]),
        ("cifar10-throughput", ["losses"]),
        ("policy-lasa", ["exactness", "losses"]),
    ],
)
def test_one_file_makes_its_sections_only(tmp_path: Path, file: str, sections: list[str]) -> None:
    (tmp_path / f"{file}.json").write_text(json.dumps(saved(file)))
    text = webpage.build(tmp_path, None)
    assert re.findall(r'<section id="(\w+)"', text) == ["how", *sections]
    links = re.findall(r'href="#(\w+)"', text)
    assert all(f'id="{link}"' in text for link in links)


def test_without_the_key_figures_the_head_has_no_cards(tmp_path: Path) -> None:
    (tmp_path / "published.json").write_text(json.dumps(saved("published")))
    assert '<ul class="cards"></ul>' in webpage.build(tmp_path, None)


def test_the_page_says_of_the_law_suite_what_the_law_suite_is() -> None:
    assert evidence.SUITE_LEVEL == test_law.SUITE_LEVEL
    assert evidence.SHARES == test_law.SHARES
    assert tuple(test_law.CHAINS) == evidence.CHAINS
    assert tuple(test_law.DRAFTERS) == evidence.DRAFTERS
    assert tuple(test_law.BLOCKS) == evidence.BLOCKS
    assert tuple(evidence.BROKEN) == reference.BUGS
    source = Path(test_law.__file__).read_text()
    assert f"{evidence.SAMPLES:_}" in source
    assert f"{evidence.MANY_SAMPLES:_}" in source


# ------------------------------------------------------------------ the recorded run


def test_the_recording_is_a_run_of_the_library() -> None:
    run = recording.record()
    assert run == recording.record()
    plain = fs.sample(recording.chain(), 1, window=recording.WINDOW, seed=recording.SEED)
    assert run.rounds[-1].x == float(plain.samples)
    assert len(run.rounds) == int(plain.calls)
    assert sum(r.accepted + 1 for r in run.rounds) == run.steps
    for before, after in pairwise(run.rounds):
        assert after.states[0] == before.x
        assert after.step == before.step + before.accepted + 1


@pytest.mark.parametrize("seed", range(8))
def test_the_recorded_test_decides_as_the_sampler_did(seed: int) -> None:
    for r in recording.record(seed=seed).rounds:
        passed = [i + 1 for i in range(r.length) if r.uniform[i] < r.bar[i]]
        assert r.accepted == max(passed, default=0)


def test_the_recording_shows_all_that_can_happen() -> None:
    rounds = recording.record().rounds
    assert any(0 < r.accepted < r.length for r in rounds)
    assert any(r.length and r.accepted == r.length for r in rounds)
    assert any(len(r.replayed) > 3 for r in rounds)


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (None, "no folder of results at"),
        ({}, "no result files (*.json) in"),
        ({"x.json": "{"}, "x.json cannot be read as JSON"),
        ({"x.json": '{"a": NaN}'}, "NaN is no JSON number"),
        ({"x.json": "[1]"}, "x.json holds no JSON object"),
        ({"x.json": "{}"}, "is a result this page shows"),
        ({"published.json": "{}"}, "published.json: the field 'rows' is missing"),
        ({"mixture-a.json": '{"rows": []}'}, "mixture-a.json: the field 'rows' is empty"),
        ({"mixture-a.json": '{"rows": [{"method": "a"}]}'}, "'speedup_error' is missing in rows[0]"),
        (
            {"curves-a.json": '{"rows": [{"method": "a", "states": 1, "speedup": "2"}]}'},
            "'speedup' in rows[0] is",
        ),
        ({"cifar10-growth.json": '{"rows": 3}'}, "cifar10-growth.json: the field 'rows' is 3"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_status_2(
    tmp_path: Path, files: dict[str, str] | None, sentence: str
) -> None:
    results, out = tmp_path / "results", tmp_path / "report.html"
    if files is not None:
        results.mkdir()
        for name, text in files.items():
            (results / name).write_text(text)
    result = CliRunner().invoke(app, ["report", "--results", str(results), "--out", str(out)])
    assert result.exit_code == 2, result.output
    assert sentence in result.output
    assert str(results) in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert not out.exists()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a result; of lists the first two."""
    if at:
        yield at
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    )
    for key, part in inner:
        yield from places(part, (*at, key))


def test_whatever_a_field_holds_the_page_is_made_or_the_file_is_named(folder: Path) -> None:
    found = read_results(folder)
    changes = [
        (result, at, wrong)
        for result in found.found.values()
        for at in places(result.data)
        for wrong in (None, "text", [], {}, 0, -1, True)
    ]
    for result, at, wrong in random.Random(0).sample(changes, 400):
        data = copy.deepcopy(result.data)
        inside = data
        for key in at[:-1]:
            inside = inside[key]
        inside[at[-1]] = wrong
        changed = Results(folder, {**found.found, result.name: replace(result, data=data)})
        problem = ""
        try:
            made = sections(changed, None)
            headlines(changed)
        except webpage.ResultError as error:
            made, problem = [], str(error)
        assert not problem or str(result.path) in problem
        assert json.dumps([plot.to_json() for s in made for plot in s.plots], allow_nan=False)
        assert all(section.html() for section in made)


def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["report", "--out", str(tmp_path / "file" / "report.html")])
    assert result.exit_code == 2
    assert "name another file with --out" in result.output


def test_the_command_writes_the_page_of_the_checkout(tmp_path: Path) -> None:
    out = tmp_path / "new" / "report.html"
    result = CliRunner().invoke(app, ["report", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_text().startswith("<!doctype html>")


# ------------------------------------------------------------------ colours


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_good(scheme: str) -> None:
    style = (Path(webpage.__file__).parent / "page.css").read_text()
    block = style.split(":root {")[1 if scheme == "light" else 2].split("}")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
    for ground in ("page", "panel", "wash"):
        for text in ("ink", "soft", "link", "accent"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for mark in ("ours", "ref", "kept", "draft", "target", *(f"c{i}" for i in range(8))):
        assert contrast(colours[mark], colours["panel"]) >= 3, mark
    assert contrast(colours["accent"], colours["accent-ink"]) >= 4.5


# ------------------------------------------------------------------ in a browser

in_a_browser = pytest.mark.skipif(find_chromium() is None, reason="needs Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser, page: Path) -> Browser:
    """The page as a reader with a wide screen, who wants no motion, opens it."""
    browser.media(prefers_reduced_motion="reduce")
    browser.size(1280)
    browser.open(page)
    return browser


def middle(tab: Browser, selector: str) -> tuple[float, float]:
    """Where an element is on the screen, having scrolled to it."""
    x, y = tab.run(
        f"(() => {{ const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
        " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
    )
    return x, y


@in_a_browser
def test_the_page_loads_without_errors_or_requests(tab: Browser, page: Path) -> None:
    assert tab.problems == []
    assert tab.requests == [page.resolve().as_uri()]
    assert tab.run("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert tab.run("[...document.images].every(i => i.alt.length > 10)")
    heads = tab.run("[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
    assert heads[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(heads))


@in_a_browser
def test_every_plot_is_drawn_with_all_its_series_and_points(tab: Browser, page: Path) -> None:
    plots = plots_of(page.read_text())
    assert len(plots) > 12
    assert tab.run("document.querySelectorAll('figure.plot').length") == len(plots)
    for name, plot in plots.items():
        drawn, buttons, marks = tab.run(
            f"(() => {{ const f = document.getElementById({name!r}); return ['.canvas [data-series]',"
            " '.legend button', '.canvas .mark, .canvas rect.bar'].map(s => f.querySelectorAll(s).length); })()"
        )
        assert drawn == buttons == len(plot["series"]), name
        assert marks == sum(len(s["points"]) for s in plot["series"] if s["role"] != "reference"), name
    assert not tab.run(
        "[...document.querySelectorAll('svg *')].some("
        "e => [...e.attributes].some(a => /NaN|undefined/.test(a.value)))"
    )


@in_a_browser
def test_a_click_in_the_legend_hides_a_series_and_another_brings_it_back(tab: Browser) -> None:
    figure = "#plot-cifar10-calls-w50"
    state = (
        f"(() => {{ const f = document.querySelector('{figure}'),"
        " g = f.querySelector('[data-series=\"default, x0 reused\"]'),"
        " b = [...f.querySelectorAll('.legend button')].find(b => b.textContent === 'default, x0 reused');"
        " return [getComputedStyle(g).display, b.getAttribute('aria-pressed'),"
        " f.querySelectorAll('[data-series]:not(.off)').length]; })()"
    )
    assert tab.run(state) == ["inline", "true", 5]
    tab.click(*middle(tab, f"{figure} .legend button:nth-child(2)"))
    assert tab.run(state) == ["none", "false", 4]
    tab.run(f"document.querySelector('{figure} .legend button:nth-child(2)').focus()")
    tab.send("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", text="\r")
    assert tab.run(state) == ["inline", "true", 5]


@in_a_browser
def test_hover_shows_values_with_standard_errors(tab: Browser) -> None:
    figure = "#plot-cifar10-calls-w50"
    tip = f"(t => t.hidden ? null : t.innerText)(document.querySelector('{figure} .tip'))"
    assert tab.run(tip) is None
    tab.move_mouse(*middle(tab, f'{figure} [data-series="default, x0 reused"] .mark:nth-last-of-type(1)'))
    shown = tab.run(tip)
    assert "steps of the chain: 1000" in shown
    assert "28.08 ± 0.21" in shown
    assert "11.97 ± 0.14" in shown
    tab.move_mouse(1, 1)
    assert tab.run(tip) is None
    tab.run(f"document.querySelector('{figure} .canvas').focus()")
    tab.press("ArrowRight")
    assert "steps of the chain: 100" in tab.run(tip)
    tab.press("Escape")
    assert tab.run(tip) is None


@in_a_browser
@pytest.mark.parametrize("width", [360, 390, 768])
def test_nothing_scrolls_sideways(browser: Browser, page: Path, width: int) -> None:
    browser.size(width, mobile=True)
    browser.open(page)
    assert browser.problems == []
    assert browser.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    outside = browser.run(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('.skip') &&"
        f" e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    plots = "[...document.querySelectorAll('.canvas > svg')].map(s => s.getBoundingClientRect().width)"
    assert min(browser.run(plots)) >= 260


@in_a_browser
def test_the_printed_page(tab: Browser) -> None:
    paper = tab.pdf()
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) >= 5
    tab.send(
        "Emulation.setEmulatedMedia",
        media="print",
        features=[{"name": "prefers-color-scheme", "value": "dark"}],
    )
    shown = "(s => getComputedStyle(document.querySelector(s)).display !== 'none')"
    assert tab.run(f"{shown}('.still-figure')")
    assert not tab.run(f"{shown}('.stage')")
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.send("Emulation.setEmulatedMedia", media="", features=[])


@in_a_browser
def test_the_run_can_be_stepped_through(tab: Browser, page: Path) -> None:
    rounds = data_of(page.read_text())["recording"]["rounds"]
    story = "document.querySelector('.story b').textContent"
    label = "document.querySelector('#stage svg').getAttribute('aria-label')"
    button = '#stage [data-do="{}"]'.format
    assert tab.run("document.querySelector('#stage').hidden") is False
    tab.click(*middle(tab, button("first")))
    assert tab.run(story) == "Round 1, one call."
    seen = [tab.run(story)]
    for _ in range(2 + 4 * (len(rounds) - 1)):
        tab.run(f"document.querySelector({button('next')!r}).click()")
        seen.append(tab.run(story))
    assert seen[1:6] == [
        "Round 1, commit.",
        *(f"Round 2, {what}." for what in ("draft", "one call", "verify", "commit")),
    ]
    assert seen[-1] == "Done."
    assert tab.run(label) == f"{len(rounds)} calls made, 24 of 24 steps committed"
    tab.click(*middle(tab, button("back")))
    assert tab.run(story) == seen[-2]
    tab.click(*middle(tab, button("play")))
    assert tab.run(f"document.querySelector({button('play')!r}).textContent") == "Pause"
    tab.click(*middle(tab, button("play")))
    assert tab.run(f"document.querySelector({button('play')!r}).textContent") == "Play"
    assert tab.problems == []


@in_a_browser
def test_it_plays_by_itself_only_where_motion_is_welcome(tab: Browser, page: Path) -> None:
    play = "document.querySelector('#stage [data-do=\"play\"]').textContent"
    settle = "new Promise(done => setTimeout(done, 400))"
    middle(tab, ".screen")
    tab.run(settle)
    assert tab.run(play) == "Play"
    tab.media(prefers_reduced_motion="no-preference")
    tab.open(page)
    assert tab.run(play) == "Play"
    middle(tab, ".screen")
    tab.run(settle)
    assert tab.run(play) == "Pause"
    assert tab.problems == []


@in_a_browser
def test_without_scripts_the_page_still_tells_its_story(browser: Browser, page: Path) -> None:
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.size(1280)
        browser.send("Page.navigate", url=page.resolve().as_uri())
        browser.wait("Page.loadEventFired")
        assert browser.run("document.querySelector('.still-figure').getBoundingClientRect().height") > 200
        assert "does not run here" in browser.run("document.body.innerText")
        assert browser.run("document.querySelectorAll('.values tbody tr').length") > 100
    finally:
        browser.send("Emulation.setScriptExecutionDisabled", value=False)
