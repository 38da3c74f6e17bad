"""The public surface: names that exist, modules that no name hides, and no import of optional packages."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import foresample as fs
from tests import outside

EXTRAS = (
    "diffusers",
    "transformers",
    "safetensors",
    "PIL",
    "typer",
    "rich",
    "tqdm",
    "matplotlib",
    "ray",
    "scipy",
)


def packages() -> list[ModuleType]:
    """The package and those within it."""
    inner = (m.name for m in pkgutil.walk_packages(fs.__path__, "foresample.") if m.ispkg)
    return [fs, *map(importlib.import_module, inner)]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_public_names_exist_and_are_named_once(package: ModuleType) -> None:
    names = getattr(package, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(package, name)] == []


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_no_module_is_hidden_by_a_name(package: ModuleType) -> None:
    """`foresample.check` is a function, so no module may have that name: its import would return the function."""
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    hidden = [name for name in modules if not isinstance(vars(package).get(name, package), ModuleType)]
    assert hidden == []


def test_names_that_others_rely_on_stay() -> None:
    """The names that other code may be written against; targets have more, which may change."""
    functions = {"accelerate", "check", "generate", "restore", "sample", "sequential", "stream", "tune"}
    classes = {"Drafter", "Engine", "Frozen", "GaussianMixture", "Replay", "Report", "Run", "Target"}
    assert functions | classes | {"pretrained", "targets", "__version__"} <= set(fs.__all__)
    makers = {"flow", "from_edm", "from_scheduler", "langevin", "replicated", "vp"}
    assert makers | {"ChainTarget"} <= set(fs.targets.__all__)
    assert {"DraftPath", "DrafterMemory", "PreviousDraft"} <= set(fs.drafters.__all__)
    assert {"Chain", "Kind", "karras_sigmas"} <= set(fs.chains.__all__)
    for module in (fs.targets, fs.chains):
        assert not set(module.__all__) & set(fs.__all__), "one home for each name"


def fresh(code: str) -> str:
    """The output of a new interpreter."""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_importing_it_brings_torch_and_numpy_and_nothing_else() -> None:
    brought = fresh(
        "import json, sys, numpy, torch\n"
        "before = set(sys.modules)\n"
        "from foresample import *\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    assert set(json.loads(brought)) - sys.stdlib_module_names <= {"foresample", "torch", "numpy"}


def test_importing_it_brings_torch_only_when_a_name_needs_it() -> None:
    """The command line is fast because of it; every name is listed before it is imported."""
    code = "import sys, foresample as fs\nprint({*fs.__all__} <= {*dir(fs)}, fs.__version__, 'torch' in sys.modules)"
    assert fresh(code) == f"True {fs.__version__} False\n"
    assert fresh("import sys, foresample as fs\nfs.sample\nprint('torch' in sys.modules)") == "True\n"
    with pytest.raises(AttributeError, match="module 'foresample' has no attribute 'sampel'"):
        fs.sampel  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_see_the_names_that_are_imported_late() -> None:
    """The names under TYPE_CHECKING are those of `__all__`, from the modules that `__getattr__` takes them from."""
    block = next(
        node for node in ast.parse(Path(str(fs.__file__)).read_text()).body if isinstance(node, ast.If)
    )
    seen = {
        alias.name: node.module
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen.keys() == {*fs.__all__}
    for name, module in seen.items():
        assert getattr(fs, name) is getattr(importlib.import_module(str(module)), name)


@pytest.mark.slow
def test_it_samples_without_any_extra() -> None:
    """Pretend that no optional package is installed: `None` in sys.modules refuses an import."""
    speedup = fresh(
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({EXTRAS!r}))\n"
        "import foresample as fs\n"
        "print(fs.sample(fs.GaussianMixture.of_draft_trees(2).flow(10, 0.1), 2, window=4).speedup)"
    )
    assert float(speedup) > 1


@pytest.mark.slow
def test_a_strangers_program_uses_every_name_and_runs(tmp_path: Path) -> None:
    """The linter checks its strict types, and `make dist` those of the installed package."""
    text = Path(outside.__file__).read_text()
    for module in (fs, fs.chains, fs.targets, fs.samplers):
        names = getattr(module, "__all__", [])
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == [], module.__name__
    outside.use_everything(tmp_path / "dataset")
