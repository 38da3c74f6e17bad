"""The program itself: how it is started, what it says of itself, and of what it lacks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer.main

from foresample import __version__
from foresample.__main__ import main
from foresample.cli import app
from tests.cli.common import invoke, succeeds

COMMANDS = typer.main.get_group(app).commands
TARGET_OPTIONS = ["model", "target", "steps", "label", "reuse"]
EXECUTION_OPTIONS = ["device", "half", "compiled", "graph", "slots", "window"]


def test_every_command_is_there_and_helps() -> None:
    assert set(COMMANDS) == {
        "sample",
        "generate",
        "inspect",
        "tune",
        "check",
        "policy-server",
        "doctor",
        "demo",
    }
    for name in COMMANDS:
        assert f"foresample {name}" in succeeds(name, "--help").replace("root", "foresample")
    assert invoke("nonsense").exit_code == 2


@pytest.mark.parametrize("command", ["sample", "generate", "tune", "check"])
def test_commands_that_take_a_target_take_the_same_options(command: str) -> None:
    flags = {flag for option in COMMANDS[command].params for flag in option.opts}
    assert {f"--{name}" for name in [*TARGET_OPTIONS, *EXECUTION_OPTIONS]} <= flags


def test_the_version() -> None:
    assert succeeds("--version") == f"foresample {__version__}\n"


def test_shells_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever shell the tests are run from."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "true")
    assert "complet" in succeeds("--show-completion", "bash")


def test_python_m_foresample() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "foresample", "sample", "--device", "abacus"], capture_output=True, text=True
    )
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == "error: --device takes cpu, cuda or cuda:N, not 'abacus'\n"


@pytest.mark.parametrize("package", ["typer", "rich", "tqdm"])
def test_without_the_extra_the_remedy_is_said(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("foresample.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert told == f"error: the command line needs {package}: pip install 'foresample[cli]'\n"
