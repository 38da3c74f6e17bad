"""The program itself: starting it, its help and version, missing packages, Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from foresample import __version__, chains, settings
from foresample.checks import findings
from foresample.cli import check, console, options
from foresample.cli.app import app
from tests.cli.common import invoke, succeeds

COMMANDS = typer.main.get_group(app).commands
TARGET_OPTIONS = ["model", "target", "steps", "label", "reuse"]
EXECUTION_OPTIONS = ["device", "half", "compiled", "graph", "slots", "window"]


def test_every_command_has_help() -> None:
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


def test_the_version_is_printed() -> None:
    assert succeeds("--version") == f"foresample {__version__}\n"


def test_completion_scripts_can_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell is named, so the test does not depend on the one it runs in."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "true")
    assert "complet" in succeeds("--show-completion", "bash")


def started(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which prints at the end which heavy modules it has imported."""
    code = f"""
import atexit, sys
heavy = ("torch", "numpy", "numba", "diffusers", "matplotlib")
atexit.register(lambda: print([name for name in heavy if sys.modules.get(name)]))
{before}
from foresample.__main__ import main
main()
"""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--help"], "Usage: foresample"),
        *((([name, "--help"], f"Usage: foresample {name}")) for name in COMMANDS),
        (["--version"], f"foresample {__version__}"),
        (["nonsense"], "No such command"),
        (["tune", "--nonsense"], "No such option"),
        (["sample", "--device", "abacus"], "error: --device takes cpu, cuda or cuda:N, not 'abacus'\n"),
        (["sample", "--model", "/nowhere"], "does not exist: not the folder of a diffusers DDPM pipeline"),
        (["tune", "--reuse", "w"], "--reuse takes one of"),
        (["tune", "--target", "vp", "--half"], "--half cannot apply to --target vp"),
        (["check", "nonsense"], "--target 'nonsense' is unknown: take one of"),
        (["check", "--target", "no_such_module:x"], "No module named 'no_such_module'"),
        (["check", "--window", "nowhere.json"], "nor a file of foresample tune --out"),
        (["check", "--drafter", "psychic"], "--drafter takes one of"),
        (["inspect", "/nowhere"], "/nowhere holds no manifest.json: not a folder of foresample generate"),
        (["generate", "--out", "/dev/null/x", "--count", "3"], "cannot write to /dev/null/x"),
        (["generate", "--out", "x", "--count", "3", "--cpus", "2"], "add --ray auto, or leave --cpus out"),
        (["demo", "--out", "/dev/null/x"], "cannot write to /dev/null"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_help_and_usage_errors_do_not_import_torch(arguments: list[str], sentence: str) -> None:
    done = started(*arguments)
    assert sentence in " ".join((done.stdout + done.stderr).replace("│", " ").split()) + "\n"
    assert done.stdout.endswith("[]\n")
    assert done.returncode == (0 if sentence.startswith(("Usage", "foresample")) else 2)


def test_a_working_command_imports_torch() -> None:
    """Shows that the test above can fail."""
    assert "'torch'" in started("doctor", "--no-test", "--json").stdout


def test_options_copied_from_the_library_match_it() -> None:
    assert options.Kind == chains.Kind
    assert (str(settings.WINDOW), findings.LEVEL) == (options.WINDOW, options.LEVEL)
    assert list(options.DRAFTERS) == list(check.DRAFTERS)


@pytest.mark.slow
def test_python_m_foresample_runs_the_command() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "foresample", "sample", "--device", "abacus"], capture_output=True, text=True
    )
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == "error: --device takes cpu, cuda or cuda:N, not 'abacus'\n"


@pytest.mark.parametrize("package", ["typer", "rich", "tqdm"])
def test_without_the_extra_the_error_names_the_remedy(package: str) -> None:
    done = started("--help", before=f"sys.modules[{package!r}] = None")
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"error: the command line needs {package}, which is not installed: pip install "
    )
    assert "foresample[" not in done.stderr


# ------------------------------------------------------------------ output


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", ["check flow --samples 50", "check flow --samples 50 --json", "doctor --no-test"]
)
def test_output_that_nobody_reads_is_no_negative_answer(arguments: str) -> None:
    """Exit status 1 would mean that the check failed; 141 is that of other programs whose reader has gone."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "foresample", *arguments.split()]
    with os.fdopen(writes, "wb") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_terminal_that_cannot_show_a_character_shows_another(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "foresample", "sample", "--target", "flow", "--count", "3", "--out"]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert "? fewer" in done.stdout


def test_a_colon_in_a_message_is_no_emoji() -> None:
    assert "--target tg:ok: leave it out" in invoke("check", "tg:ok", "--steps", "4").stderr


def test_a_narrow_terminal_keeps_the_labels_of_a_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = console.plain_table("per sample", "sequential", "speculative", "", left=1)
    table.add_row("network calls", "16", "5.3", "3.02× fewer")
    table.add_row("time, all 100", "1.23 ms", "1.11 ms", "no difference within the noise")
    console.show(table)
    printed = capsys.readouterr().out
    assert all(len(line) <= 40 for line in printed.splitlines())
    for word in ("network", "calls", "16", "5.3", "3.02×", "noise"):
        assert word in printed


# ------------------------------------------------------------------ Ctrl-C

SLOW_IMPORT = """
import signal, sys
from importlib.abc import MetaPathFinder

class Interrupting(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == WHERE:
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["typer", "rich.table", "torch", "foresample.checks.exactness", "numpy.linalg"]
)
def test_control_c_during_an_import_leaves_at_once(where: str) -> None:
    done = started("check", "vp", before=SLOW_IMPORT.replace("WHERE", repr(where)))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_control_c_stops_a_working_command(tmp_path: Path, times: int) -> None:
    """The first is an exception that a command may handle; the second ends the process."""
    (tmp_path / "mine.py").write_text(
        "import signal\n"
        "def make():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        f"    finally:\n        [signal.raise_signal(signal.SIGINT) for _ in range({times - 1})]\n"
    )
    command = [sys.executable, "-m", "foresample", "check", "mine:make"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("module", ["numba.core.compiler", "llvmlite.binding.ffi", "importlib._bootstrap"])
def test_control_c_where_an_exception_would_be_swallowed_leaves_at_once(module: str) -> None:
    """LLVM calls Python back, and drops what the callback raises: the process would go on."""
    code = f"""
import signal
from foresample.cli import interrupts
signal.signal(signal.SIGINT, interrupts.interrupt)
try:
    exec("import signal; signal.raise_signal(signal.SIGINT)", {{"__name__": {module!r}}})
except KeyboardInterrupt:
    print("raised")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
