"""The page about this repository's evidence: its contents, and its behaviour in a real browser."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import foresample as fs
from benchmarks import report
from benchmarks.kinds.clock import GpuTests
from benchmarks.names import LABELS
from benchmarks.report import evidence, recording
from benchmarks.report.exactness import _gpu_tests
from benchmarks.report.headlines import headlines
from benchmarks.result_files import KINDS, ResultError, Results, parse_result
from benchmarks.results import RESULTS, read
from tests.law import test_law
from tests.support import reference
from tests.support.browser import Tab, chromium, data_of, in_a_browser, plots_of, values

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WRONG: list[Any] = [None, "text", [], {}, 0, -1, True, 1e99, 1e-99]
HOSTILE = "</script><img src=x onerror=alert(1)>&\"'"
FILES = sorted(path.relative_to(RESULTS) for path in RESULTS.rglob("*.json"))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    report.write(path)
    return path


def saved(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


# ------------------------------------------------------------------ what it says


@pytest.mark.parametrize(
    ("name", "x"),
    [("mixture-d500-T30-v", "window"), ("cifar10-calls-w50", "steps"), ("curves-wells-T100", "states")],
)
def test_plots_show_the_numbers_of_their_file(page: Path, name: str, x: str) -> None:
    plot, rows = plots_of(page.read_text())[f"plot-{name}"], saved(name)["rows"]
    told: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        if row["method"] != "sequential":
            reused = f", {row['reuse']} reused" if "calls" in name else ""
            line = told.setdefault(LABELS[row["method"]] + reused, [])
            line.append((row[x], row["speedup"], row["speedup_error"]))
    assert {s["name"] for s in plot["series"]} == set(told)
    for method, points in told.items():
        assert values(plot, method) == sorted(points)


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
    rounds = plots["plot-rounds-cifar10-latency-graph"]
    for row in saved("cifar10-latency-graph")["rounds"]:
        name = f"window {row['window']}" if row["window"] else "sequential"
        parts = [values(rounds, series["name"]) for series in rounds["series"]]
        total = sum(y for part in parts for x, y, _ in part if x == name)
        assert total == pytest.approx(row["round_us"])


def test_the_head_has_the_best_figures_and_the_worst(page: Path) -> None:
    text = page.read_text()
    (ours,) = [
        r
        for r in saved("cifar10-calls-w50")["rows"]
        if (r["steps"], r["method"], r["reuse"]) == (1000, "default", "x0")
    ]
    assert f"<b>{ours['speedup']:.1f}×</b>" in text
    rows = saved("cifar10-throughput")["rows"]
    share = min(row["samples_per_second"] / row["sequential_samples_per_second"] for row in rows)
    assert f"<b>{share:.2f}×</b>" in text


def test_inexact_methods_are_drawn_as_inexact(page: Path) -> None:
    plot = plots_of(page.read_text())["plot-quality-cost-fashion"]
    roles = {series["name"]: series["role"] for series in plot["series"]}
    assert roles["default"] == "ours"
    assert roles["blocks, parent"] == "exact"
    assert [name for name, role in roles.items() if role == "inexact"] == [
        "ParaDiGMS",
        "DDIM",
        "DPM-Solver++ 2M",
    ]
    rows = [row for row in saved("quality-cost-fashion")["rows"] if row["method"] == "ddim"]
    assert values(plot, "DDIM") == [(row["calls"], row["distance"], None) for row in rows]


def test_the_page_counts_the_tests_on_a_gpu(page: Path) -> None:
    gpu = saved("gpu-tests")
    assert f"{len(gpu['passed'])} tests passed, {len(gpu['failed'])} failed" in page.read_text()


def test_a_stopped_run_of_tests_is_shown_as_unfinished() -> None:
    whole = replace(read().of(GpuTests)[0], failed=[], unfinished=[])
    stopped = replace(whole, unfinished=["tests/gpu/test_kernels.py::test_the_law"])
    assert "not finished" not in _gpu_tests(whole)
    assert "1 were not finished" in _gpu_tests(stopped)
    assert "test_the_law" in _gpu_tests(stopped)


def test_every_source_is_shown_with_command_commit_versions_and_machine(page: Path) -> None:
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
    assert sources
    assert all(s.startswith(("data:", "#")) for s in sources)
    assert "@import" not in text
    assert not re.search(r"url\((?!data:)", text)
    assert "default-src 'none'" in text


@pytest.mark.slow
@pytest.mark.parametrize("missing", FILES, ids=str)
def test_the_page_can_be_made_without_any_one_file(missing: Path) -> None:
    results = read()
    name = missing.with_suffix("").as_posix()
    few = replace(results, found=[result for result in results.found if result.name != name])
    assert len(few.found) == len(results.found) - 1
    text = "".join(section.html() for section in report.sections(few, report.PICTURES))
    assert f"<b>{name}.json</b>" not in text
    assert headlines(few)


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
def test_one_file_makes_only_its_sections_whatever_its_name(
    tmp_path: Path, file: str, sections: list[str]
) -> None:
    (tmp_path / "some name.json").write_text(json.dumps(saved(file)))
    text = report.build(tmp_path, tmp_path)
    assert re.findall(r'<section id="(\w+)"', text) == ["how", *sections]
    links = re.findall(r'href="#(\w+)"', text)
    assert all(f'id="{link}"' in text for link in links)


def test_without_the_key_figures_the_head_has_no_cards(tmp_path: Path) -> None:
    (tmp_path / "published.json").write_text(json.dumps(saved("published")))
    assert '<ul class="cards"></ul>' in report.build(tmp_path, tmp_path)


def test_files_that_the_page_does_not_show_are_named(page: Path) -> None:
    (told,) = re.findall(r"Result files that this page does not show: (.*?)\.</p>", page.read_text())
    assert "earlier/cifar10-calls-w50-gain-only.json" in told
    assert "training-classifier.json" in told
    assert "cifar10-calls-w50.json" not in told.split(", ")


def test_the_page_describes_the_distribution_tests_correctly() -> None:
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
    assert run.rounds[-1].x == pytest.approx(float(plain.samples), abs=1e-9)  # by rounds that may be compiled
    assert len(run.rounds) == int(plain.calls)
    assert sum(r.accepted + 1 for r in run.rounds) == run.steps
    for before, after in pairwise(run.rounds):
        assert after.states[0] == before.x
        assert after.step == before.step + before.accepted + 1


@pytest.mark.parametrize("seed", range(8))
def test_the_recorded_test_decides_as_the_sampler_did(seed: int) -> None:
    rounds = recording.record(seed=seed).rounds
    assert any(r.length for r in rounds)
    for r in rounds:
        passed = [i + 1 for i in range(r.length) if r.uniform[i] < r.bar[i]]
        assert r.accepted == max(passed, default=0)


def test_the_recording_shows_every_kind_of_event() -> None:
    rounds = recording.record().rounds
    assert any(0 < r.accepted < r.length for r in rounds)
    assert any(r.length and r.accepted == r.length for r in rounds)
    assert any(len(r.replayed) > 3 for r in rounds)


# ------------------------------------------------------------------ bad input


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to the values in a result; lists contribute their first two."""
    if at:
        yield at
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    )
    for key, part in inner:
        yield from places(part, (*at, key))


def hostile(value: Any) -> Any:
    """The same value with every text in it replaced, except kinds and names that decide how a file is read."""
    if isinstance(value, dict):
        return {key: value[key] if key in ("kind", "dtype") else hostile(value[key]) for key in value}
    if isinstance(value, list):
        return [hostile(part) for part in value]
    return HOSTILE if isinstance(value, str) else value


def test_hostile_texts_are_escaped(tmp_path: Path) -> None:
    for name in ("check-embedded", "mixture-d64-T300-v"):
        (tmp_path / f"{name}.json").write_text(json.dumps(hostile(saved(name))))
    (tmp_path / "<b>&.json").write_text(json.dumps({"from": HOSTILE}))
    text = report.build(tmp_path, tmp_path)
    assert "<img src=x" not in text
    assert "<b>&." not in text
    assert text.count("</script>") == 2
    assert HOSTILE in json.dumps(data_of(text), ensure_ascii=False).replace('\\"', '"')


def test_a_text_that_cannot_be_encoded_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({**saved("check-embedded"), "command": "\ud800"}))
    report.write(tmp_path / "page.html", tmp_path, tmp_path)
    assert "<code>?</code>" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_folder_without_results_writes_no_page(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="no result files in"):
        report.write(tmp_path / "page.html", tmp_path)
    assert not (tmp_path / "page.html").exists()


def test_for_any_value_of_a_field_the_page_is_made_or_the_file_is_named() -> None:
    results = read()
    changes = [
        (result.name, at, wrong)
        for result in results.found
        for at in places(saved(result.name))
        if at != ("kind",)
        for wrong in WRONG
    ]
    for name, at, wrong in random.Random(0).sample(changes, 1000):
        data = inside = copy.deepcopy(saved(name))
        for key in at[:-1]:
            inside = inside[key]
        inside[at[-1]] = wrong
        refusal = ""
        try:
            changed = parse_result(KINDS[data["kind"]], data, RESULTS / f"{name}.json", name)
            others = [result for result in results.found if result.name != name]
            some = Results(RESULTS, [changed, *random.Random(1).sample(others, 5)], [])
            made = report.sections(some, Path("nowhere"))
            assert json.dumps([plot.to_json() for s in made for plot in s.plots], allow_nan=False)
            assert all(section.html() for section in made)
            headlines(some)
        except ResultError as error:
            refusal = str(error)
        assert not refusal or refusal.startswith(f"{RESULTS / name}.json: ")


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
def test_text_and_plots_have_enough_contrast(scheme: str) -> None:
    page = palette(report.HERE / "page.css", scheme)
    for ground in ("page", "panel", "wash"):
        for text in ("ink", "soft", "link", "accent"):
            assert contrast(page[text], page[ground]) >= 4.5, (text, ground)
    for mark in ("ours", "ref", *(f"c{i}" for i in range(8))):
        assert contrast(page[mark], page["panel"]) >= 3, mark
    assert contrast(page["accent"], page["accent-ink"]) >= 4.5
    colours = palette(report.HERE / "run.css", scheme)
    for mark in ("kept", "draft", "target"):
        assert contrast(colours[mark], page["panel"]) >= 3, mark


# ------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser, page: Path) -> Iterator[Tab]:
    """The page as a reader with a wide screen, who wants no motion, opens it."""
    tab = Tab(browser, reduced_motion="reduce")
    tab.page.goto(page.resolve().as_uri())
    yield tab
    tab.page.close()


@in_a_browser
def test_errors_and_requests_of_a_page_are_recorded(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        "<img src='lost.png'><script>console.warn('careful'); throw new Error('broken')</script>"
    )
    tab, uri = Tab(browser), tmp_path.resolve().as_uri()
    tab.page.goto(f"{uri}/page.html")
    assert tab.requests == [f"{uri}/page.html", f"{uri}/lost.png"]
    assert {"careful", "broken"} < set(tab.problems)
    assert any("ERR_FILE_NOT_FOUND" in problem for problem in tab.problems)


@in_a_browser
def test_the_page_loads_without_errors_or_requests(tab: Tab, page: Path) -> None:
    assert tab.problems == []
    assert tab.requests == [page.resolve().as_uri()]
    assert tab.page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert tab.page.evaluate("[...document.images].every(i => i.alt.length > 10)")
    heads = tab.page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => Number(h.tagName[1]))")
    assert heads[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(heads))


@in_a_browser
def test_every_plot_is_drawn_with_all_its_series_and_points(tab: Tab, page: Path) -> None:
    plots = plots_of(page.read_text())
    assert len(plots) > 12
    assert tab.drawn() == {name: len(plot["series"]) for name, plot in plots.items()}
    for name, plot in plots.items():
        figure = tab.page.locator(f"#{name}")
        assert figure.locator(".legend button").count() == len(plot["series"]), name
        marks = sum(len(s["points"]) for s in plot["series"] if s["role"] != "reference")
        assert figure.locator(".canvas .mark, .canvas rect.bar").count() == marks, name


@in_a_browser
def test_a_click_in_the_legend_hides_a_series_and_another_brings_it_back(tab: Tab) -> None:
    figure = tab.page.locator("#plot-cifar10-calls-w50")
    series = figure.locator('[data-series="default, x0 reused"]')
    button = figure.get_by_role("button", name="default, x0 reused")

    def state() -> list[Any]:
        display = series.evaluate("g => getComputedStyle(g).display")
        return [
            display,
            button.get_attribute("aria-pressed"),
            figure.locator("[data-series]:not(.off)").count(),
        ]

    assert state() == ["inline", "true", 5]
    button.click()
    assert state() == ["none", "false", 4]
    button.press("Enter")
    assert state() == ["inline", "true", 5]


@in_a_browser
def test_hover_shows_values_with_standard_errors(tab: Tab) -> None:
    figure = tab.page.locator("#plot-cifar10-calls-w50")
    tip = figure.locator(".tip")
    assert tip.is_hidden()
    figure.locator('[data-series="default, x0 reused"] .mark').last.hover(force=True)
    shown = tip.inner_text()
    assert "steps of the chain: 1000" in shown
    assert "28.08 ± 0.21" in shown
    assert "11.97 ± 0.14" in shown
    tab.page.mouse.move(1, 1)
    assert tip.is_hidden()
    figure.locator(".canvas").press("ArrowRight")
    assert "steps of the chain: 100" in tip.inner_text()
    tab.page.keyboard.press("Escape")
    assert tip.is_hidden()


@in_a_browser
@pytest.mark.parametrize("width", [360, 390, 768])
def test_nothing_scrolls_sideways(browser: Browser, page: Path, width: int) -> None:
    tab = Tab(browser, width, is_mobile=True)
    tab.page.goto(page.resolve().as_uri())
    assert tab.problems == []
    assert tab.page.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    outside = tab.page.evaluate(
        "[...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll') && !e.closest('.skip') &&"
        f" e.getBoundingClientRect().right > {width} + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    plots = "[...document.querySelectorAll('.canvas > svg')].map(s => s.getBoundingClientRect().width)"
    assert min(tab.page.evaluate(plots)) >= 260


@in_a_browser
def test_the_printed_page(tab: Tab) -> None:
    paper = tab.page.pdf(format="A4", print_background=True)
    assert paper.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) >= 5
    tab.page.emulate_media(media="print", color_scheme="dark")
    assert tab.page.locator(".still-figure").is_visible()
    assert tab.page.locator(".stage").is_hidden()
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@in_a_browser
def test_the_run_can_be_stepped_through(tab: Tab, page: Path) -> None:
    rounds = data_of(page.read_text())["recording"]["rounds"]
    stage = tab.page.locator("#stage")

    def button(name: str) -> Any:
        return stage.locator(f'[data-do="{name}"]')

    def story() -> str:
        return tab.page.locator(".story b").text_content() or ""

    assert stage.is_visible()
    button("first").click()
    assert story() == "Round 1, one call."
    seen = [story()]
    for _ in range(2 + 4 * (len(rounds) - 1)):
        button("next").click()
        seen.append(story())
    assert seen[1:6] == [
        "Round 1, commit.",
        *(f"Round 2, {what}." for what in ("draft", "one call", "verify", "commit")),
    ]
    assert seen[-1] == "Done."
    label = stage.locator("svg").get_attribute("aria-label")
    assert label == f"{len(rounds)} calls made, 24 of 24 steps committed"
    button("back").click()
    assert story() == seen[-2]
    button("play").click()
    assert button("play").text_content() == "Pause"
    button("play").click()
    assert button("play").text_content() == "Play"
    assert tab.problems == []


@in_a_browser
def test_the_animation_starts_by_itself_only_where_motion_is_welcome(tab: Tab, page: Path) -> None:
    play, screen = tab.page.locator('#stage [data-do="play"]'), tab.page.locator(".screen")
    screen.scroll_into_view_if_needed()
    # An observer that begins later is called no earlier than the page's own.
    screen.evaluate("e => new Promise(seen => new IntersectionObserver(seen).observe(e)).then(() => true)")
    assert play.text_content() == "Play"
    tab.page.emulate_media(reduced_motion="no-preference")
    tab.page.goto(page.resolve().as_uri())
    assert play.text_content() == "Play"
    screen.scroll_into_view_if_needed()
    tab.page.locator('#stage [data-do="play"]', has_text="Pause").wait_for()
    assert tab.problems == []


@in_a_browser
def test_the_page_can_be_read_without_scripts(browser: Browser, page: Path) -> None:
    tab = Tab(browser, java_script_enabled=False)
    tab.page.goto(page.resolve().as_uri())
    box = tab.page.locator(".still-figure").bounding_box()
    assert box
    assert box["height"] > 200
    assert "does not run here" in tab.page.inner_text("body")
    assert tab.page.locator(".values tbody tr").count() > 100
