"""`foresample generate` and `foresample inspect`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foresample as fs
from foresample import pretrained
from foresample.checks.samples import SamplesLaw
from foresample.cli.generate import DatasetBar, Finishing
from foresample.core.noise import seeds_of
from foresample.datasets.manifest import Status
from foresample.engine.tuning import Trial
from foresample.sizes import readable
from tests.cli.common import invoke, refuses, succeeds
from tests.datasets.disturbing import ENVIRONMENT
from tests.datasets.test_suspicion import forge
from tests.support.tiny_model import copy_model
from tests.support.waiting import GUARD, wait_for

Tunes = Callable[[int | None], list[int]]


def dataset(folder: Path, out: Path, *more: object) -> list[object]:
    fixed = ["--model", folder, "--count", 7, "--steps", 9, "--window", 3, "--shard", 3, "--slots", 2]
    return ["generate", *fixed, "--out", out, *more]


def mixture(out: Path, *more: object) -> list[object]:
    return default(out, "--window", 8, *more)


def default(out: Path, *more: object) -> list[object]:
    """The command with the default window."""
    return ["generate", "--target", "flow", "--count", 7, "--shard", 3, "--slots", 2, "--out", out, *more]


def test_draws_resumes_and_refuses_other_settings(folder: Path, tmp_path: Path) -> None:
    told = succeeds(*dataset(folder, tmp_path, "--law", "20"))
    assert "7 of 7, 1×8×8, float32" in told
    assert "passed: 9 tests" in told
    files = [load_file(path) for path in sorted(tmp_path.glob("shard-*"))]
    assert [len(f["samples"]) for f in files] == [3, 3, 1]
    assert torch.cat([f["labels"] for f in files]).tolist() == [0, 1, 2, 0, 1, 2, 0]
    plain = fs.sample(pretrained.load(folder).target(9), 7, window=3)
    torch.testing.assert_close(torch.cat([f["samples"] for f in files]), plain.samples, rtol=1e-4, atol=1e-4)

    before = [path.stat().st_ino for path in sorted(tmp_path.glob("shard-*"))]
    succeeds(*dataset(folder, tmp_path))
    assert [path.stat().st_ino for path in sorted(tmp_path.glob("shard-*"))] == before
    for more, sentence in (
        (["--label", "coat"], "labels [0, 1, 2] there and [1] here"),
        (["--half"], "network 'float32' there and 'bfloat16' here"),
        (["--reuse", "v"], "reuse 'x0' there and 'v' here"),
        (["--window", "4"], "window 3 there and 4 here"),
    ):
        refuses(sentence, *dataset(folder, tmp_path, *more))


def test_other_weights_are_other_settings(folder: Path, tmp_path: Path) -> None:
    path = copy_model(folder, tmp_path / "tiny")
    succeeds(*dataset(folder, tmp_path / "out"))
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    state["conv_in.bias"] = state["conv_in.bias"] + 1
    save_file(state, weights)
    refuses("holds a dataset with other settings (weights ", *dataset(path, tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        (
            "scheduler",
            {"prediction_type": "epsilon"},
            "scheduler.prediction_type 'v_prediction' there and 'eps",
        ),
        ("scheduler", {"clip_sample": False}, "scheduler.clip_sample True there and False here"),
        ("unet", {"act_fn": "relu"}, "unet.act_fn 'silu' there and 'relu' here"),
        ("unet", {"flip_sin_to_cos": False}, "unet.flip_sin_to_cos True there and False here"),
    ],
    ids=str,
)
def test_other_configurations_are_other_settings(
    folder: Path, tmp_path: Path, part: str, change: dict[str, Any], sentence: str
) -> None:
    """The weights are the same; the configuration is compared, or else the fingerprint."""
    path, out = copy_model(folder, tmp_path / "tiny"), tmp_path / "out"
    succeeds(*dataset(path, out))
    kept = {shard.name: shard.stat().st_ino for shard in out.glob("shard-*")}
    config = path / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    original = config.read_text()
    config.write_text(json.dumps({**json.loads(original), "_note": "of no matter"}))
    succeeds(*dataset(path, out))
    config.write_text(json.dumps({**json.loads(original), **change}))
    (out / "shard-00001.safetensors").unlink()
    refuses(sentence, *dataset(path, out))
    manifest = json.loads((out / "manifest.json").read_text())
    manifest["settings"][part] |= change
    (out / "manifest.json").write_text(json.dumps(manifest))
    refuses("holds samples of another target (its ", *dataset(path, out))
    kept.pop("shard-00001.safetensors")
    assert {shard.name: shard.stat().st_ino for shard in out.glob("shard-*")} == kept


def test_a_named_target_and_its_manifest(tmp_path: Path) -> None:
    manifest = json.loads(succeeds(*mixture(tmp_path, "--json")))
    assert (manifest["kind"], manifest["settings"]["target"]) == ("dataset", "flow")
    assert json.loads((tmp_path / "manifest.json").read_text())["kind"] == "dataset"
    plain = fs.sample(fs.GaussianMixture.of_draft_trees(2).flow(16, 1.0), 7, window=8).samples
    files = [load_file(path)["samples"] for path in sorted(tmp_path.glob("shard-*"))]
    assert torch.equal(torch.cat(files), plain)
    refuses("target 'flow' there and 'vp' here", *mixture(tmp_path, "--target", "vp"))


def test_a_dataset_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    succeeds(*mixture(tmp_path))
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["kind"]
    path.write_text(json.dumps(manifest))
    assert json.loads(succeeds("inspect", tmp_path, "--json"))["kind"] == "dataset"
    succeeds(*mixture(tmp_path))
    assert json.loads(path.read_text())["kind"] == "dataset"


@pytest.mark.parametrize("measured", [4, None], ids=["gains", "does not gain"])
def test_the_window_is_measured_once_and_the_dataset_drawn_with_the_faster_sampler(
    tmp_path: Path, tunes: Tunes, measured: int | None
) -> None:
    asked = tunes(measured)
    told = succeeds(*default(tmp_path))
    assert (
        "take window 4" if measured else "Sample sequentially: with 2 samples at a time no window gains"
    ) in told
    settings = json.loads((tmp_path / "manifest.json").read_text())["settings"]
    assert settings["window"] == (measured or 0)
    assert (settings["method"] == "sequential") == (measured is None)
    assert asked == [2]
    target = fs.GaussianMixture.of_draft_trees(2).flow(16, 1.0)
    plain = fs.sequential(target, 7) if measured is None else fs.sample(target, 7, window=4)
    files = [load_file(path) for path in sorted(tmp_path.glob("shard-*"))]
    assert torch.equal(torch.cat([f["samples"] for f in files]), plain.samples)
    (tmp_path / "shard-00001.safetensors").unlink()
    tunes(None if measured else 5)
    told = succeeds(*mixture(tmp_path, "--window", "auto"))  # the default: it keeps to what was begun
    assert f"{'Window 4' if measured else 'Sequential sampling'} is kept" in told
    assert f"16 steps, {'window 4' if measured else 'drawn sequentially'}" in told
    assert asked == [2]
    again = [load_file(path)["samples"] for path in sorted(tmp_path.glob("shard-*"))]
    assert torch.equal(torch.cat(again), plain.samples)
    refuses("method ", *mixture(tmp_path, "--window", "3" if measured is None else tuned(tmp_path, None)))


def tuned(folder: Path, window: int | None) -> Path:
    """The file of a tuning."""
    path = folder / "tuning.json"
    fs.Tuning(16, 2, 1e-3, [Trial(2, 6, 1e-3, 1e-3, 9.0, 0.4)], window, None).save(path)
    return path


# ------------------------------------------------------------------ exit status


def test_broken_samples_exit_with_3(folder: Path, tmp_path: Path) -> None:
    path = copy_model(folder, tmp_path / "model")
    weights = path / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    state["class_embedding.weight"][2] = torch.nan
    save_file(state, weights)
    result = invoke(*dataset(path, tmp_path / "out"))
    assert result.exit_code == 3
    assert "5 of 7" in result.output
    for sample in (2, 5):
        seed = int(seeds_of(0, 7)[sample])
        assert f"sample {sample} (seed {seed}) broke: the network returned NaN" in result.output
    assert invoke("inspect", tmp_path / "out").exit_code == 1


def test_a_failed_distribution_check_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    law = SamplesLaw(False, 9, 1e-9, "norm", 1e-3, 7, 5)
    monkeypatch.setattr("foresample.datasets.workers.samples_law", lambda *_: law)
    result = invoke(*mixture(tmp_path, "--law", "20"))
    assert result.exit_code == 1
    assert "FAILED: 9 tests" in result.output


def interrupts_in(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)


@pytest.mark.parametrize("place", ["cli.generate.generate", "datasets.workers.draw_shards"])
def test_a_command_interrupted_before_a_sample_is_saved_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    interrupts_in(monkeypatch, f"foresample.{place}")
    result = invoke(*mixture(tmp_path))
    assert result.exit_code == 130
    assert result.stderr == "interrupted before any sample was saved: run the same command again\n"


@pytest.mark.parametrize("place", ["generate.LocalWorker", "workers.LocalWorker.law"])
def test_an_interruption_of_a_complete_dataset_loses_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """While the target is loaded, and while the distribution is checked."""
    succeeds(*mixture(tmp_path))
    interrupts_in(monkeypatch, f"foresample.datasets.{place}".replace("generate.", "generation."))
    result = invoke(*mixture(tmp_path, "--law", "20"))
    assert result.exit_code == 130
    assert result.stderr == (
        f"interrupted: the dataset in {tmp_path} is complete, but its distribution was not checked: run the same "
        "command again to check it\n"
    )
    assert invoke(*mixture(tmp_path)).stderr == (
        f"interrupted: the dataset in {tmp_path} is complete\n" if place == "generate.LocalWorker" else ""
    )


def test_a_window_of_0_draws_sequentially(tmp_path: Path) -> None:
    assert "16 steps, drawn sequentially" in succeeds(*mixture(tmp_path, "--window", "0"))
    (tmp_path / "manifest.json").unlink()
    refuses("give the same ones, among them the same window (0: sequential)", *mixture(tmp_path))
    refuses("has shards, but no manifest.json: run the command that drew them again", "inspect", tmp_path)
    succeeds(*mixture(tmp_path, "--window", "0"))
    assert "16 steps, drawn sequentially" in succeeds("inspect", tmp_path)


def test_a_distribution_check_that_cannot_fail_is_refused(tmp_path: Path) -> None:
    refuses("with 1 sequential one cannot fail", *mixture(tmp_path, "--law", "1"))


HELD = """
import time
from dataclasses import replace
from pathlib import Path
import foresample as fs

def make():
    base = fs.GaussianMixture.of_draft_trees(2).flow(16, 0.1)

    def network(x, step, row):
        if len(row) > 4 and (row >= 30).any() and not Path("open").exists():
            Path("held").touch()
            while not Path("open").exists():
                time.sleep(0.01)  # Ctrl-C comes here
        return base.network(x, step, row)

    return replace(base, network=network)
"""


@pytest.mark.slow
def test_control_c_finishes_begun_samples_and_a_second_one_stops_at_once(tmp_path: Path) -> None:
    """The network holds the process when sample 30 gets one of eight slots; the fingerprint, on four states, passes."""
    (tmp_path / "held.py").write_text(HELD)
    command = [sys.executable, "-m", "foresample", "generate", "--target", "held:make", "--count", "60"]
    command += ["--slots", "8", "--window", "6", "--shard", "16", "--out"]

    def interrupted(out: str, *, times: int) -> tuple[fs.Dataset, str]:
        log = tmp_path / f"{out}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [*command, out], cwd=tmp_path, env=ENVIRONMENT, stderr=errors, stdout=subprocess.DEVNULL
            )

        def until(condition: Callable[[], bool], what: str) -> None:
            def held_or_dead() -> bool:
                assert process.poll() is None, log.read_text()
                return condition()

            wait_for(held_or_dead, what)

        try:
            until((tmp_path / "held").exists, "sample 30")
            process.send_signal(signal.SIGINT)
            until(lambda: "no more samples are begun" in log.read_text(), "what it says")
            if times == 2:
                process.send_signal(signal.SIGINT)
            else:
                (tmp_path / "open").touch()
            assert process.wait(timeout=GUARD) == 130
        finally:
            process.kill()
            process.wait()
        assert "Traceback" not in log.read_text()
        return fs.inspect_dataset(tmp_path / out), log.read_text()

    cut, told = interrupted("cut", times=2)
    assert "those that needed few rounds finished first" in told
    assert cut.fair == 0 < cut.in_order
    with pytest.warns(UserWarning, match="the first 0 are known to be fair"):
        cut.samples()
    (tmp_path / "held").unlink()

    ended, told = interrupted("ended", times=1)
    assert "interrupted: run the same command again to resume" in told
    assert 30 < ended.fair == ended.in_order == ended.manifest["costs"]["samples"] <= 30 + 8
    first = torch.cat(list(ended.samples()))  # without a warning, which would be an error here

    target = fs.GaussianMixture.of_draft_trees(2).flow(16, 0.1)
    assert torch.equal(first, fs.sample(target, len(first), window=6).samples)


def test_control_c_stops_at_once_before_the_first_sample_and_after_the_last() -> None:
    before = signal.getsignal(signal.SIGINT)
    for count, drawing in ((9, False), (0, True)):
        bar = DatasetBar(count, quiet=True)
        with Finishing(bar) as stop:
            if drawing:
                bar.update(Status(0, 16, 0, 0))  # the law check is what is left
                assert not stop()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            assert not stop.requested
    assert signal.getsignal(signal.SIGINT) is before


def test_wrong_input_exits_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses("add --ray auto, or leave --cpus out", *mixture(tmp_path, "--cpus", "2"))
    refuses("no Ray cluster at 127.0.0.1:1", *mixture(tmp_path, "--ray", "127.0.0.1:1"))
    refuses("greater than or equal to 1", *mixture(tmp_path, "--count", "0"))
    (tmp_path / "file").write_text("")
    refuses("cannot write to", *mixture(tmp_path / "file" / "out"))
    refuses("is empty: name a folder or a file", *mixture(""))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray", None)
    refuses("this needs ray, which is not installed: pip install 'ray", *mixture(tmp_path, "--ray", "auto"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refuses("this needs safetensors, which is not installed: pip install 'safetensors", *mixture(tmp_path))
    assert not list(tmp_path.glob("shard-*"))


# ------------------------------------------------------------------ foresample inspect


def test_inspect_verifies_and_draws_a_picture(folder: Path, tmp_path: Path) -> None:
    succeeds(*dataset(folder, tmp_path))
    assert "wrote" in succeeds("inspect", tmp_path, "--pictures", "4")
    assert (tmp_path / "contact.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(succeeds("inspect", tmp_path, "--json"))["costs"]["samples"] == 7
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 1
    assert "4 of 7" in result.output
    refuses("not a folder of foresample generate", "inspect", tmp_path / "nowhere")


def test_inspect_shows_how_many_samples_of_an_interrupted_dataset_are_fair(
    folder: Path, tmp_path: Path
) -> None:
    succeeds(*dataset(folder, tmp_path, "--law", "20"))
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 1
    told = " ".join(result.output.split())
    assert "the first 3, of which 3 are known to be fair; the others may be a biased selection" in told
    assert "distribution not checked: samples are missing" in told
    assert "shard-00001.safetensors does not count, it is torn or corrupt" in result.stderr
    assert "passed" not in told


def test_inspect_does_not_speak_of_other_samples_where_there_are_none(tmp_path: Path) -> None:
    """The last shards are lost, or all of them: what is left is fair."""
    succeeds(*mixture(tmp_path))
    (tmp_path / "shard-00002.safetensors").unlink()
    told = " ".join(invoke("inspect", tmp_path).stdout.split())
    assert "in order the first 6, of which 6 are known to be fair shards 2" in told
    assert "calls a sample" in told
    for shard in tmp_path.glob("shard-*"):
        shard.write_bytes(b"")
    told = " ".join(invoke("inspect", tmp_path).stdout.split())
    assert "in order the first 0, of which 0 are known to be fair shards 0" in told
    assert "a sample" not in told


def test_inspect_describes_a_dataset_whose_picture_it_cannot_write(folder: Path, tmp_path: Path) -> None:
    succeeds(*dataset(folder, tmp_path))
    (tmp_path / "contact.png").mkdir()
    result = invoke("inspect", tmp_path)
    assert result.exit_code == 0
    assert "7 of 7" in result.stdout
    assert "wrote" not in result.stdout
    assert result.stderr.startswith("no contact sheet: cannot write ")
    assert json.loads(invoke("inspect", tmp_path, "--json").stdout)["costs"]["samples"] == 7


def test_inspect_writes_its_picture_only_into_the_folder(folder: Path, tmp_path: Path) -> None:
    out, treasure = tmp_path / "out", tmp_path / "treasure"
    succeeds(*dataset(folder, out))
    treasure.write_text("gold")
    (out / "contact.png").symlink_to(treasure)
    succeeds("inspect", out)
    assert treasure.read_text() == "gold"
    assert (out / "contact.png").read_bytes().startswith(b"\x89PNG")


def test_numbers_and_files_that_cannot_be_used_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fs.Engine, "draw", None)
    refuses(
        "are 1000000000 files, and a folder takes 1000000",
        *mixture(tmp_path, "--count", 10**12, "--shard", 1000),
    )
    refuses("a shard of 1000000000000 samples would", *mixture(tmp_path, "--count", 10**15, "--shard", 10**12))
    refuses("cannot be read (it is not a plain file)", *mixture(piped(tmp_path / "piped"), "--window", "auto"))


def piped(out: Path) -> Path:
    out.mkdir()
    os.mkfifo(out / "manifest.json")
    return out


# ------------------------------------------------------------------ text from elsewhere

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\nerror: none"


def assert_printable(result: Any) -> None:
    assert "Traceback" not in result.output
    assert all(c.isprintable() or c == "\n" for c in result.stdout + result.stderr), (
        result.stdout,
        result.stderr,
    )
    assert not any(line.startswith("error: none") for line in (result.stdout + result.stderr).splitlines())


def test_control_characters_in_a_dataset_are_not_printed(mine: str, tmp_path: Path) -> None:
    out = tmp_path / f"out {ESCAPES}"
    command = ["generate", "--target", "mine:Broken", "--count", 5, "--shard", 3, "--window", 2, "--out", out]
    assert_printable(invoke(*command))
    failure = {"index": 1, "seed": int(seeds_of(0, 5)[1]), "step": 1, "error": ESCAPES}
    forge(out / "shard-00000.safetensors", lambda tensors: None, failures=[failure])
    found = invoke("inspect", out)
    assert "sample 1 (seed" in found.stderr
    assert "\\x1b]0;owned\\x07" in found.stderr
    assert_printable(found)
    path = out / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["settings"] |= {"target": f"[/red]{ESCAPES}", ESCAPES: 1}
    manifest["choice"] = f"[bold]{ESCAPES}"
    path.write_text(json.dumps(manifest))
    assert_printable(invoke(*command))
    manifest["runs"] = {ESCAPES: 1}
    path.write_text(json.dumps(manifest))
    assert_printable(invoke("inspect", out))
    (out / "shard-00000.safetensors").write_bytes(b"nothing")
    assert_printable(invoke("inspect", out))


def test_control_characters_in_the_name_of_a_class_are_not_printed(mine: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"made = type({ESCAPES!r}, (), {{}})\n")
    result = invoke(*mixture(tmp_path / "out", "--target", "mine:made"))
    assert result.exit_code == 2
    assert "is not a target" in result.stderr
    assert_printable(result)


def test_commands_print_only_through_the_console() -> None:
    """The console removes control characters."""
    cli = Path(fs.__file__).parent / "cli"
    others = [path for path in cli.rglob("*.py") if path != cli / "console.py"]
    assert len(others) > 10
    for path in others:
        assert not re.search(r"(?<!\w)(print|Console|typer\.echo)\(", path.read_text()), path


@pytest.mark.parametrize("shape", [[2**53] * 40, [2**20] * 300], ids=["large", "long"])
def test_inspect_refuses_shapes_too_large_for_memory(tmp_path: Path, shape: list[int]) -> None:
    succeeds(*mixture(tmp_path))
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["settings"]["shape"] = shape
    path.write_text(json.dumps(manifest))
    refuses("settings.shape is [", "inspect", tmp_path)


def test_any_number_of_bytes_can_be_read() -> None:
    assert [readable(size) for size in (0, 999, 1500, 10**15)] == ["0 bytes", "999 bytes", "1.5 kB", "1 PB"]
    assert readable(10**5000) == "more than a million PB"
