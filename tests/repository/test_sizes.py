"""Files, classes, functions and signatures that can be read at a sitting, and a true map of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "foresample"
FILES = sorted(PACKAGE.rglob("*.py"))
KERNELS = (
    "backends/numba/",
    "backends/triton/",
)  # a kernel takes one argument for each buffer and is one function

FILE = 500  # lines at most, and so on
CLASS = 330
FUNCTION = 70
PARAMETERS = 10
LONGER_FILES = {"backends/numba/round.py": 540, "backends/triton/round.py": 670}
LONGER_CLASSES = {"integrations/diffusers/pipelines.py:AcceleratedPipeline": 400}
LONGER_FUNCTIONS = {"datasets/generation.py:generate": 95}  # a third of it documents the arguments

ROW = re.compile(r"^\| (?P<paths>`[^|]*) \| (?P<content>[^|]*) \| (?P<lines>\d+) \|$", re.MULTILINE)
TOLERANCE = 0.12  # of a room's lines, as the map gives them
SMALL = 40  # lines that a small room may be off


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines())


def too_long(text: str, name: str) -> Iterator[str]:
    """Classes, functions and signatures of a module that are beyond the bounds."""
    kernel = name.startswith(KERNELS)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if isinstance(node, ast.ClassDef):
            bound = LONGER_CLASSES.get(f"{name}:{node.name}", CLASS)
        else:
            bound = LONGER_FUNCTIONS.get(f"{name}:{node.name}", FUNCTION)
            given = node.args
            every = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            parameters = len(every) - (every[:1] in (["self"], ["cls"]))
            if parameters > PARAMETERS and not kernel:
                yield f"{name}:{node.lineno}: {node.name} has {parameters} parameters, {PARAMETERS} at most"
        if lines > bound and not kernel:
            yield f"{name}:{node.lineno}: {node.name} has {lines} lines, {bound} at most"


def test_every_file_can_be_read_at_a_sitting() -> None:
    sizes = {name_of(path): lines_of(path) for path in FILES}
    assert not {name: lines for name, lines in sizes.items() if lines > LONGER_FILES.get(name, FILE)}
    assert not [finding for path in FILES for finding in too_long(path.read_text(), name_of(path))]


def test_a_function_that_is_too_long_or_takes_too_much_is_found() -> None:
    many = ", ".join(f"a{i}" for i in range(PARAMETERS + 1))
    text = f"def wide({many}):\n" + "    pass\n" * FUNCTION
    assert len(list(too_long(text, "engine/new.py"))) == 2
    assert not list(too_long(text, "backends/numba/new.py"))
    method = f"class A:\n    def wide(self, {many.removesuffix(', a10')}):\n" + "        pass\n" * (
        FUNCTION - 1
    )
    assert not list(too_long(method, "engine/new.py"))
    assert len(list(too_long("class Long:\n" + "    a = 1\n" * CLASS, "engine/new.py"))) == 1


# ------------------------------------------------------------------ the map in docs/architecture.md


def rooms() -> list[tuple[set[str], str, int]]:
    """Each row of the map: the files of the room, the text of the row, and its number of lines."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = []
    names = [re.findall(r"`([^`]+)`", match["paths"]) for match in ROW.finditer(text)]
    folders = {path for row in names for path in row if path.endswith("/")}
    for match, paths in zip(ROW.finditer(text), names, strict=True):
        own = set()
        for path in paths:
            inner = [folder for folder in folders if folder.startswith(path) and folder != path]
            own |= {
                name
                for name in map(name_of, FILES)
                if (name.startswith(path) if path.endswith("/") else name == path)
                and not name.startswith(tuple(inner))
            }
        found.append((own, match["content"], int(match["lines"])))
    return found


def test_the_map_has_every_file_once() -> None:
    on_map = sorted(name for own, _, _ in rooms() for name in own)
    assert on_map == sorted(set(map(name_of, FILES)) - {"__init__.py"})


def test_the_map_names_every_module_of_a_room() -> None:
    """Commands apart, whose files are named after them."""
    missing = [
        name
        for own, content, _ in rooms()
        for name in sorted(own)
        if "/" in name and not name.startswith(("cli/", *KERNELS)) and not name.endswith("__init__.py")
        if f"`{Path(name).stem}`" not in content
    ]
    assert not missing


def test_the_map_gives_the_lines_of_each_room() -> None:
    wrong = []
    for own, content, given in rooms():
        lines = sum(lines_of(PACKAGE / name) for name in own)
        if abs(lines - given) > max(TOLERANCE * lines, SMALL):
            wrong.append(f"{content[:40]}: {given} lines on the map, {lines} in the files")
    assert not wrong, "\n".join(wrong)
