"""Plain words: how a docstring may begin, and the words that no message and no page may use."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEAKING = ("foresample", "benchmarks", "recipes", "examples")  # a user reads their messages
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "foresample/cli/demo/page.html")
]
PAGES += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "examples").rglob("*.ipynb"))

KERNELS = ROOT / "foresample" / "backends" / "triton"  # kept as they were measured, to the letter

BEGINNING = re.compile(r"(?:Of|Those|What|Who|Whose|How)\b|Whether to\b")
WORDS = re.compile(
    r"\b(?:told|said|asked(?! for\b)|looked at|in vain|of late|comes to|is none|where there is one"
    r"|(?<!power )(?<![/-])laws?)\b"  # tests/law and --law are names
)
NO_PROSE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<[^>]*>|https?://\S+", re.DOTALL)  # code, links, tags


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts of two words and more, wherever they are: raised, warned, printed, or kept in a name to be shown later."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in alone:
            continue
        if len(node.value.split()) > 1:
            yield node.lineno, node.value


def in_code(text: str, speaking: bool = True) -> list[str]:
    """Findings in a module; `speaking` is true if users read its messages."""
    tree = ast.parse(text)
    found = [
        f"{line}: a docstring begins {match[0]!r}: {docstring.splitlines()[0]}"
        for line, docstring in docstrings(tree)
        if (match := BEGINNING.match(docstring))
    ]
    for line, message in messages(tree) if speaking else ():
        found += [
            f"{line}: {word!r} in {message.strip()!r}" for word in WORDS.findall(NO_PROSE.sub("", message))
        ]
    return found


def in_prose(text: str, theory: bool = False) -> list[str]:
    """Findings on a page; theory may speak of laws."""
    prose = NO_PROSE.sub(lambda match: "\n" * match[0].count("\n"), text)
    return [
        f"{number}: {word!r} in {line.strip()!r}"
        for number, line in enumerate(prose.splitlines(), start=1)
        for word in WORDS.findall(line)
        if not (theory and word.startswith("law"))
    ]


def in_file(path: Path) -> list[str]:
    text = path.read_text()
    if path.suffix == ".py":
        return in_code(text, path.relative_to(ROOT).parts[0] in SPEAKING)
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return in_prose(text, theory=path.name == "theory.md")


def test_every_sentence_is_in_plain_words() -> None:
    paths = [path for folder in (*SPEAKING, "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    paths = [path for path in paths + PAGES if not path.is_relative_to(KERNELS)]
    assert len(paths) > 300
    found = [f"{path.relative_to(ROOT)}:{finding}" for path in paths for finding in in_file(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "first", ["Of a row.", "Those of a kind.", "What is new.", "Who waits.", "Whether to go."]
)
def test_a_docstring_that_begins_without_its_noun_is_found(first: str) -> None:
    text = f'class Found:\n    def find(self):\n        """{first}\n\n        More.\n        """\n'
    assert len(in_code(text)) == 1
    assert len(in_code(text, speaking=False)) == 1


@pytest.mark.parametrize(
    "first", ["Offsets of rows.", "Whether any value is NaN.", "However wide.", "Rows, and how."]
)
def test_a_docstring_with_its_noun_passes(first: str) -> None:
    assert not in_code(f'"""{first}"""')


@pytest.mark.parametrize(
    "call",
    [
        'raise ValueError("no gain: it comes to 3")',
        'print(f"the same law in {seconds} s")',
        'warnings.warn("a network is " "looked at twice")',
        'typer.Option(help="Seed of the law check.")',
        'SENTENCE = "gone of late"',
    ],
)
def test_a_message_with_a_word_to_guess_at_is_found(call: str) -> None:
    assert len(in_code(call)) == 1
    assert not in_code(call, speaking=False)


@pytest.mark.parametrize(
    "line",
    [
        'print("follow a power law")',
        'print("as many as were asked for")',
        'print("`law` is a marker")',
        'print("run tests/law or generate --law 10")',
        'names = ["law"]',
        '"""One law."""',
    ],
)
def test_names_and_plain_messages_pass(line: str) -> None:
    assert not in_code(line)


def test_a_page_is_read_without_its_code_and_links() -> None:
    page = "One [law](said.md).\n\n```python\nlaw = told\n```\n\nNone `of late`, <b>drafted in vain</b>.\n"
    assert [line.partition(":")[0] for line in in_prose(page)] == ["1", "7"]
    assert [line.partition(":")[0] for line in in_prose(page, theory=True)] == ["7"]
