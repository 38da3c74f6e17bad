"""The documentation: its code runs, its links lead somewhere, every public name and every number has its source."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

import foresample as fs
from benchmarks import pens
from benchmarks.kinds.robots import Pens
from benchmarks.results import load
from benchmarks.tables import FIGURES, filled
from tests import supported
from tests.support.browser import Tab, chromium, in_a_browser

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


README = (ROOT / "README.md").read_text()

# ------------------------------------------------------------------ every block of every page runs

BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE
)
SLOW = {
    "api.md",
    "diffusers.md",
    "drafters.md",
    "gpus.md",
    "packages.md",
    "performance.md",
    "policies.md",
    "robots.md",
}
"""Pages that take more than a second or two."""
SMALLER = {
    "diffusers.md": {"num_inference_steps=50": "num_inference_steps=8, height=8, width=8"},
    "edm.md": {'device="cuda"': 'device="cpu"', "karras_sigmas(64": "karras_sigmas(6", "count=16": "count=2"},
    "gpus.md": {"steps=20": "steps=6"},
    "performance.md": {"steps=20": "steps=6"},
}
"""Text of a page, and the smaller size or the CPU that replaces it. All else runs as it stands."""


def of_packages(folder: Path) -> dict[str, Any]:
    """Small objects of the real packages, and the stand-in for OpenAI's class, which is in no registry."""
    from tests.integrations import test_packages as packages
    from tests.support import deepinv, openai, posteriors

    diffusion, z = openai.copies()[0].make(variance="LEARNED_RANGE", keep=range(0, 60, 6)), torch.randn(4, 1, 2)
    inferer = packages.monai_inferer(packages.monai_ddpm())
    return {
        "deepinv": deepinv.package(),
        "denoiser": deepinv.Softly(),
        "measured": deepinv.measured(2),
        "physics": deepinv.physics(),
        "diffusion": diffusion,
        "dit": openai.Guided(diffusion),
        "z": torch.cat([z, z]),
        "y": {"shift": torch.zeros(8, 1, 1)},
        "posterior": posteriors.posterior(prior=posteriors.box(0.5)),
        "x_o": torch.zeros(1, 2),
        "gaussian_diffusion": packages.gaussian(),
        "inferer": inferer,
        "unet": packages.MonaiNet("epsilon", inferer.scheduler.alphas_cumprod),
        "noise": torch.randn(2, 1, 2),
        "atom_diffusion": packages.atom_diffusion("v2"),
        "arguments": packages.arguments("v2"),
        "model": lambda x, sigma, **given: x / (1 + sigma.view(-1, 1) ** 2),
        "x": 10 * torch.randn(2, 3),
        "sigmas": torch.tensor([10.0, 5.0, 2.0, 1.0, 0.3, 0.0]),
    }


def of_edm(folder: Path) -> dict[str, Any]:
    return {"model": lambda x, sigma: x / (1 + sigma.view(-1, 1, 1, 1) ** 2)}


def of_diffusers(folder: Path) -> dict[str, Any]:
    """A real Stable Diffusion pipeline, tiny and with random weights."""
    from tests.support.pipelines import stable_diffusion
    from tests.support.policies import seeded

    return {"pipe": stable_diffusion(folder), "g1": seeded(1), "g2": seeded(2)}


def of_policies(folder: Path) -> dict[str, Any]:
    """LeRobot's real policy, small and untrained."""
    from tests.support import lerobots

    policy = lerobots.policy()
    policy.reset()
    seen = {name: value[:, 0] for name, value in lerobots.observation(policy).items()}
    return {"policy": policy, "observation": seen}


def of_robots(folder: Path) -> dict[str, Any]:
    """A checkout's assets, and LeRobot's class, which the page imports."""
    from tests.support import lerobots

    Path("assets").symlink_to(ROOT / "assets")
    with lerobots.importing():
        importlib.import_module("lerobot.policies.diffusion.modeling_diffusion")
    return {}


HAS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "packages.md": of_packages,
    "edm.md": of_edm,
    "diffusers.md": of_diffusers,
    "policies.md": of_policies,
    "robots.md": of_robots,
}
"""Names that the reader of a page brings along: small stand-ins, and real objects of the libraries it is about."""


def blocks(page: Path) -> list[str]:
    """Code of the page that is run, made smaller."""
    found = [match["code"] for match in BLOCK.finditer(page.read_text()) if match["why"] is None]
    for text, small in SMALLER.get(page.name, {}).items():
        assert any(text in code for code in found), f"{text} is no longer on {page.name}"
        found = [code.replace(text, small) for code in found]
    return found


def run_page(page: Path, folder: Path) -> dict[str, Any]:
    """Names the blocks of a page leave, run one after the other in an empty folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    names |= HAS[page.name](folder) if page.name in HAS else {}
    for code in blocks(page):
        exec(compile(code, page.name, "exec", dont_inherit=True), names)
    return names


RUN = [page for page in PAGES if blocks(page) or page.name in HAS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page.name in SLOW else []) for page in RUN],
    ids=lambda page: page.name,
)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    names = run_page(page, tmp_path)
    LEFT.get(page.name, lambda names: None)(names)


def test_at_most_two_blocks_are_not_run() -> None:
    """`<!-- not run: why -->` before a block excludes it and gives the reason."""
    left_out = [match["why"] for page in PAGES for match in BLOCK.finditer(page.read_text()) if match["why"]]
    fences = sum(page.read_text().count("```python") for page in PAGES)
    assert len(left_out) <= 2
    assert fences == sum(len(BLOCK.findall(page.read_text())) for page in PAGES), "a block nobody runs"


def after_extending(names: dict[str, Any]) -> None:
    """The classes defined on the page do what the page claims."""
    chain = names["OrnsteinUhlenbeck"]()
    result = fs.check(chain, window=5, drafter=names["Damped"](), samples=300)
    assert result.passed, str(result)
    assert fs.sample(chain, 10, window=10).speedup > 2
    tempered = names["Tempered"]()
    assert fs.check(tempered, window=5, samples=300).passed
    heun, zero = names["Heun"](), torch.zeros(4, dtype=torch.int64)
    heun.here, heun.there = torch.tensor([2.0]), torch.tensor([1.5])
    heun.denoise = lambda x, sigma: x / (1 + sigma**2)  # of unit Gaussian data, whose slope is σ/(1 + σ²)·x
    x = torch.ones(4, 3)
    slopes = 2 / 5 * x, 1.5 / 3.25 * (x - 0.5 * 2 / 5 * x)
    euler = x + (1.5 - 2) * (x - heun.predict(x, zero, zero)) / 2
    torch.testing.assert_close(euler, x - 0.5 * (slopes[0] + slopes[1]) / 2)


def after_generate(names: dict[str, Any]) -> None:
    assert names["dataset"].complete
    assert names["dataset"].law.passed
    assert names["samples"].shape == (100, 2)


def after_performance(names: dict[str, Any]) -> None:
    assert names["run"].samples.isfinite().all()
    assert names["sample"].calls > 0


def after_index(names: dict[str, Any]) -> None:
    """The target of `mine.py` is exact, and its network calls are halved at least."""
    assert fs.sample(names["target"], 4, window=20).speedup > 2
    assert fs.check(names["target"], window=20, samples=100).passed


LEFT: dict[str, Callable[[dict[str, Any]], None]] = {
    "extending.md": after_extending,
    "generate.md": after_generate,
    "performance.md": after_performance,
    "index.md": after_index,
}
"""Assertions about the names that a page leaves."""


# ------------------------------------------------------------------ every public name is documented, with an example

MODULES = (fs, fs.targets, fs.chains, fs.drafters, fs.samplers, fs.pretrained)
PUBLIC = sorted(
    {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__}
    - {m.__name__ for m in MODULES}
)


def value(path: str) -> Any:
    """The object of a dotted path."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@cache
def shown() -> list[str]:
    """Dotted paths that the reference shows."""
    return [path for page in PAGES for path in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)]


@cache
def docstrings() -> set[str]:
    """Names at the top of a module that have a docstring: functions, classes, and values with a string behind them."""
    found = set()
    for path in (ROOT / "foresample").rglob("*.py"):
        body = ast.parse(path.read_text()).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                found.add(node.name)
            has_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if has_string and isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@cache
def used() -> set[str]:
    """Public names that code of a page uses, as `foresample.x` or `foresample.targets.x`."""
    found = set()
    for page in RUN:
        for code in blocks(page):
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.Attribute):
                    found.add(re.sub(r"^fs\.", "foresample.", ast.unparse(node)))
    return found


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_in_the_reference_with_an_example_that_runs(name: str) -> None:
    if name == "foresample.__version__":
        assert name in used()
        return
    same = [path for path in {*PUBLIC, *shown()} if value(path) is value(name)]
    assert name.rpartition(".")[2] in docstrings(), f"{name} has no docstring"
    assert [path for path in same if path in shown()], f"no page says `::: {name}`"
    assert used().intersection(same), f"no page has an example of {name}"


def test_the_reference_shows_nothing_twice() -> None:
    assert len({id(value(path)) for path in shown()}) == len(shown())


# ------------------------------------------------------------------ the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built strictly: a lost link or anchor is a warning of mkdocs, which ends such a build."""
    pytest.importorskip("mkdocs", reason="needs the extra foresample[docs]")
    out = tmp_path_factory.mktemp("site")
    run = build_site(ROOT, out)
    assert run.returncode == 0, run.stderr
    return out


@pytest.mark.slow
def test_the_site_is_whole_and_fetches_nothing(site: Path) -> None:
    fetched = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//""")
    for page in (ROOT / "docs").glob("*.md"):
        text = (site / f"{page.stem}.html").read_text()
        assert not fetched.search(text), page.name


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *args: Any) -> None: ...


@pytest.mark.slow
@in_a_browser
def test_pages_fit_a_desk_and_a_phone_and_can_be_searched(site: Path) -> None:
    """The site is served on the loopback, and the pages request nothing from anywhere else."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    home = f"http://127.0.0.1:{server.server_port}/"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium() as browser:
            for width in (1280, 390):
                tab = Tab(browser, width, 900, is_mobile=width < 500)
                for page in sorted((ROOT / "docs").glob("*.md")):
                    tab.page.goto(f"{home}{page.stem}.html")
                    assert tab.page.evaluate("document.documentElement.scrollWidth") <= width, (
                        page.name,
                        width,
                    )
                if width == 1280:
                    tab.page.locator(".md-search__input").click()
                    tab.page.keyboard.type("recycling")
                    tab.page.locator(".md-search-result__item").first.wait_for()
                assert tab.problems == []
                assert [address for address in tab.requests if not address.startswith(home)] == []
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_mistakes_fail_the_build(tmp_path: Path) -> None:
    """A site of two pages with the same settings: one that is right, and one with a mistake of every kind."""
    pytest.importorskip("mkdocs", reason="needs the extra foresample[docs]")
    (tmp_path / "docs").mkdir()
    for name in ("hooks.py", "site.css"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs" / name)
    (tmp_path / "docs" / "theory.md").write_text("# Theory\n\n## 3. Block verification\n")
    settings, _, _ = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")
    (tmp_path / "mkdocs.yml").write_text(settings.replace("paths: [.]", f'paths: ["{ROOT}"]'))
    page = tmp_path / "docs" / "index.md"
    page.write_text("# Start\n\n[theory](theory.md#3-block-verification)\n")
    assert build_site(tmp_path, tmp_path / "site").returncode == 0
    page.write_text(
        "# Start\n\n[page](lost.md) [anchor](theory.md#lost) [file](../lost.json) ![picture](lost.png)\n"
    )
    run = build_site(tmp_path, tmp_path / "site")
    assert run.returncode != 0
    assert run.stderr.count("WARNING") == 4, run.stderr
    page.write_text("# Start\n\n::: foresample.lost\n")
    assert build_site(tmp_path, tmp_path / "site").returncode != 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_read_alike_on_a_forge_and_on_the_site(page: Path) -> None:
    """Python-Markdown wants an empty line before a list, and four spaces before what belongs to an item."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    item = r"(?:\*|-|\d+\.) "
    for before, line in pairwise(text.split("\n")):
        alone = not before or before.startswith("<!--")
        assert not (alone and re.match(r" {1,3}\S", line)), f"four spaces, please: {line}"
        assert alone or not re.match(item, line) or re.match(rf" *{item}|  ", before), (
            f"an empty line before: {line}"
        )


def build_site(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, capture_output=True, text=True, env=quiet)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_what_is_supported_are_made_by_the_tests(page: Path) -> None:
    """`python -m tests.supported` writes them."""
    text = page.read_text()
    assert supported.filled(text) == text


def test_every_table_is_on_a_page() -> None:
    used = {name for page in PAGES for name in re.findall(r"<!-- table: (\w+) -->", page.read_text())}
    assert used == set(supported.TABLES)


def test_a_package_of_the_table_has_its_test() -> None:
    for *_, test in (*supported.PACKAGES.values(), *supported.POLICIES.values()):
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(), test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_come_from_the_result_files(page: Path) -> None:
    """`python -m benchmarks.tables` writes them."""
    text = page.read_text()
    assert filled(text) == text


# ------------------------------------------------------------------ no number is typed by hand

NUMBER = re.compile(r"[×±] ?\d[\d.]*|(?<![\w.])\d[\d ]*\.\d+(?: ?[×%])?|(?<![\w.])\d+ ?[×%]")
"""Text that reads like a measurement: a decimal point, or a number with ×, ± or %."""

ALLOWED: dict[str, dict[str, str]] = {
    "README.md": {"2.0": "version of the licence"},
    "comparison.md": {"20 %": "published (RASS)", "0.001": "tolerance of the authors", "0.1": "tolerance"},
    "comparison-tables.md": {
        "1.96": "published (draft-tree papers)",
        "1.99": "published (draft-tree papers)",
        "2.14": "published (draft-tree papers)",
    },
    "diffusers.md": {"0.42": "version of diffusers", "0.0": "value of a setting"},
    "support.md": {"3.11": "version of Python", "2.7": "version of torch"},
    "models.md": {"0.9995": "constant of the recipes"},
    "policies.md": {"±1": "scale of the data"},
    "robots.md": {"2.10": "version of torch", "0.35": "version of diffusers", "0.4": "version of LeRobot"},
    "theory.md": {"1.2": "constant of a formula", "8.5": "constant of a formula"},
}
"""Numbers on a page that are no results of ours, and what they are."""


def typed_numbers(text: str) -> list[str]:
    """Numbers outside of figures, code, formulas (indented blocks) and addresses."""
    text = re.sub(r"<!-- (figures|power): \w+ -->\n.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = "\n".join(line for line in text.split("\n") if not re.match(r" {4,}", line))
    return [found.strip() for found in NUMBER.findall(re.sub(r"`[^`]*`|\]\(http[^)]*\)", "", prose))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_number_comes_from_a_result_file(page: Path) -> None:
    """Make it in `benchmarks/tables.py` from a result, or name its source in `ALLOWED`."""
    allowed = ALLOWED.get(page.name, {})
    found = typed_numbers(page.read_text())
    assert [number for number in found if number not in allowed] == []
    assert [number for number in allowed if number not in found] == [], "no longer on the page"


def test_a_number_typed_by_hand_is_found() -> None:
    figures = "<!-- figures: models -->\n| 7.27 ± 0.12 |\n<!-- end -->"
    code = "```python\nx = 0.5\n```\n\n    y = 0.25 z\n\n`h=0.1`"
    assert typed_numbers(f"{figures}\n{code}\nstep 3 of 1000, 64 samples, T=100, v2.x") == []
    for text in ("2.33", "12 %", "3×", "4.5×", "± 3", "± 0.2", "1 234.5 ms"):
        assert typed_numbers(f"It is {text} now."), text
    assert typed_numbers("from 27.44 ± 0.21 to 28 %") == ["27.44", "± 0.21", "28 %"]


def test_the_moving_picture_is_drawn_from_its_result_file() -> None:
    assert pens.PICTURE.read_text("utf-8") == pens.svg(load(Pens, "pens"))


def test_the_readme_can_be_read_aloud_in_a_minute() -> None:
    """The sentences without code, addresses and the line of links; people read 160 to 200 words a minute aloud."""
    text = re.sub(
        r"```.*?```|^ {4}.*?$|<!--.*?-->|!\[.*?\)|\]\(.*?\)", "", README, flags=re.DOTALL | re.MULTILINE
    )
    words = [word for word in text.partition("## Read on")[0].split() if re.search(r"\w", word)]
    assert len(words) <= 200


def test_every_figure_is_on_a_page() -> None:
    used = {name for page in PAGES for name in re.findall(r"<!-- figures: (\w+) -->", page.read_text())}
    assert used == set(FIGURES)
