"""Options that name a target, and options that exclude each other, alike in every command that takes a target."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import foresample as fs
from foresample.chains import Kind
from foresample.cli.options import TargetOptions
from foresample.cli.targets import Source, make_source
from tests.cli.common import invoke, refuses, succeeds


def source(**given: Any) -> Source:
    options = TargetOptions(**given)
    options.check()
    return make_source(options)


# ------------------------------------------------------------------ what is made


@pytest.mark.parametrize("name", ["flow", "vp", "langevin"])
def test_mixtures_by_name(name: str) -> None:
    assert len(source(target=name)().std) == 16
    made = source(target=name, steps=5)()
    assert len(made.std) == 5
    assert fs.sample(made, 2, window=2).samples.shape == (2, 2)


def test_the_embedded_model_is_the_default() -> None:
    pytest.importorskip("diffusers")
    assert source() == source(target="embedded")
    assert source(label="coat", steps=7).labels() == [4]
    assert len(source(steps=7)().std) == 7


@pytest.mark.parametrize("command", ["sample", "tune", "check"])
def test_only_a_dataset_takes_a_window_of_0(command: str) -> None:
    refuses("'0' is neither a whole number of at least 1 nor auto", command, "--window", "0")


@pytest.mark.parametrize("reuse", get_args(Kind))
def test_every_prediction_that_help_names_can_be_reused_exactly(folder: Path, reuse: str) -> None:
    assert f"{reuse}" in " ".join(succeeds("check", "--help").split("--reuse")[1].split("--")[0].split())
    succeeds("check", "--model", folder, "--steps", "4", "--samples", "50", "--reuse", reuse)


def test_a_model_folder(folder: Path) -> None:
    chosen = source(model=folder, steps=12, label="shoe", reuse="v", half=True)
    assert len(chosen().std) == 12
    assert (chosen.labels(), chosen.names()) == ([2], ["hat", "coat", "shoe"])
    assert {"model": "tiny", "reuse": "v", "network": "bfloat16"}.items() <= chosen.about().items()


@pytest.mark.parametrize("name", ["make", "target", "Walk"], ids=["function", "object", "class"])
def test_a_custom_target(mine: str, name: str) -> None:
    chosen = source(target=f"mine:{name}", device="cpu")
    assert len(chosen().std) == 6
    assert chosen.about() == {"target": f"mine:{name}"}


def test_a_source_makes_the_target_in_another_folder_too(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = pickle.dumps(source(target="mine:make"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(pickle.loads(sent)().std) == 6


# ------------------------------------------------------------------ what is refused

FOUR = pytest.mark.parametrize("command", ["sample", "generate", "tune", "check"])
BAD = {
    "two targets": (["--model", "a", "--target", "b:c"], "--model and --target both say what to sample"),
    "no such name": (
        ["--target", "nonsense"],
        "--target 'nonsense' is unknown: take one of flow, vp, langevin, embedded",
    ),
    "no such module": (
        ["--target", "no_such_module:x"],
        "cannot load 'no_such_module:x': ModuleNotFoundError: No module named",
    ),
    "no such object": (["--target", "mine:nothing"], "cannot load 'mine:nothing': AttributeError"),
    "no target": (["--target", "os:sep"], "str is not a target: it lacks shape"),
    "a function that fails": (["--target", "mine:breaks"], "cannot load 'mine:breaks': KeyError: 'weights'"),
    "label of a target": (
        ["--target", "mine:make", "--label", "1"],
        "--label cannot apply to --target mine:make",
    ),
    "steps of a target": (
        ["--target", "mine:make", "--steps", "9"],
        "--steps cannot apply to --target mine:make",
    ),
    "flags of a mixture": (["--target", "vp", "--half", "--compiled"], "--half and --compiled cannot apply to"),
    "no such device": (["--device", "abacus"], "--device takes cpu, cuda or cuda:N, not 'abacus'"),
    "no GPU": (["--device", "cuda"], "there is no cuda here"),
    "not so many GPUs": (["--device", "cuda:7"], "there is no cuda:7 here"),
    "a graph on a CPU": (["--target", "flow", "--graph"], "--graph cannot apply to"),
    "a graph of a model on a CPU": (["--target", "embedded", "--graph"], "--graph cannot apply to"),
    "no such folder": (["--model", "/nowhere"], "not the folder of a diffusers DDPM pipeline"),
    "no such prediction": (
        ["--target", "embedded", "--reuse", "w"],
        "--reuse takes one of x0, eps, v, score, not 'w'",
    ),
    "no steps": (["--steps", "0"], "greater than or equal to 1"),
    "no window": (["--window", "-1"], "'-1' is neither a whole number of at least"),
    "a word for a window": (["--window", "wide"], "'wide' is neither a whole number of at least"),
    "no slots": (["--slots", "0"], "greater than or equal to 1"),
}


@FOUR
@pytest.mark.parametrize(("options", "sentence"), BAD.values(), ids=list(BAD))
def test_bad_options(
    command: str, options: list[str], sentence: str, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refuses(sentence, command, *OUT[command], *options)
    assert not list(Path().rglob("*.safetensors"))


OUT = {"sample": ["--out", "out"], "generate": ["--out", "out", "--count", "4"], "tune": [], "check": []}


@FOUR
def test_bad_numbers_for_a_model(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [command, *OUT[command], "--model", folder]
    monkeypatch.chdir(tmp_path)
    refuses("unknown label 'sock': choose one of hat, coat, shoe", *arguments, "--label", "sock")
    refuses("unknown label '²': choose one of hat, coat, shoe", *arguments, "--label", "²")
    refuses("this model was trained with 1000 timesteps", *arguments, "--steps", "5000")


@FOUR
@pytest.mark.parametrize("package", ["diffusers", "safetensors"])
def test_a_missing_extra(command: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    refuses(
        f"this needs {package}, which is not installed: pip install '{package}",
        command,
        *OUT[command],
        "--target",
        "embedded",
    )


def test_a_target_is_not_moved_to_another_device(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    refuses(
        "mine:make is on cpu, and --device cuda moves only models",
        "tune",
        "--target",
        "mine:make",
        "--device",
        "cuda",
    )


# ------------------------------------------------------------------ errors in the user's own code


def line_of(text: str) -> int:
    return Path("mine.py").read_text().splitlines().index(text) + 1


def test_an_error_names_the_user_s_file_and_line(mine: str) -> None:
    """The innermost frame that belongs neither to foresample nor to an installed package."""
    failing = line_of("        return x @ torch.ones(3, 3)")
    place = f"(mine.py, line {failing}, in predict); --traceback shows every frame"
    refuses(place, "sample", "--target", "mine:Fails")
    refuses("error: RuntimeError: mat1 and mat2 shapes cannot", "tune", "--target", "mine:Fails")
    raising = line_of("    raise KeyError('weights')")
    refuses(f"KeyError: 'weights' (mine.py, line {raising}, in breaks)", "check", "--target", "mine:breaks")


@pytest.mark.parametrize("before", [True, False])
def test_the_whole_traceback_on_request(mine: str, before: bool) -> None:
    command = ["sample", "--target", "mine:Fails"]
    result = invoke(*(["--traceback", *command] if before else [*command, "--traceback"]))
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr
    assert "engine.py" in result.stderr


def test_a_network_called_with_arguments_it_does_not_take(mine: str) -> None:
    """The expected call, and where the network is defined."""
    sentence = "a network is called as network(x, time, row), but <lambda>(x, t) ("
    refuses(sentence, "sample", "--target", "mine:narrow")
    refuses("does not take that: wrap it, for example as lambda", "sample", "--target", "mine:narrow")


@pytest.mark.parametrize(
    "command",
    [["check", "--samples", "10"], ["sample"], ["generate", "--count", "4", "--out", "new"], ["tune"]],
)
def test_a_target_that_crashes_gives_exit_status_2(mine: str, command: list[str]) -> None:
    """Exit status 1 is "not exact", and 0 is "exact": a crash is neither, and its words stay words."""
    result = invoke(*command, "--target", f"{mine}:Crashes")
    assert result.exit_code == 2, result.output
    assert "KeyError: '\\x1b[31mweights'" in result.stderr
    assert "mine.py" in result.stderr
    assert "\x1b" not in result.output
    refuses("cannot load 'mine:leaves': SystemExit: 0", *command, "--target", f"{mine}:leaves")
