"""`foresample doctor`: it describes the machine, and its self-test can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from foresample import __version__
from foresample.cli import doctor
from foresample.core import round as plain
from tests.cli.common import invoke, succeeds

SMALL = ["--samples", "300"]


def told(*arguments: str) -> dict[str, Any]:
    return json.loads(succeeds("doctor", "--json", *arguments))


def test_doctor_describes_this_machine() -> None:
    found = told(*SMALL)
    assert found["versions"]["foresample"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["name"] == "cpu"
    assert found["devices"][0]["round"] == ("Numba" if find_spec("numba") else "plain")
    assert not found["devices"][0]["graphs"]
    assert all(test["passed"] for test in found["tests"])
    assert found["tests"][0]["round"] == found["devices"][0]["round"]


def test_doctor_prints_its_findings_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    text = succeeds("doctor", *SMALL)
    assert f"foresample   {__version__}" in text
    assert "cpu: the plain round serves, as FORESAMPLE_PLAIN=1 asks" in text
    assert "ok    plain rounds on cpu: distribution: " in text


def test_optional_packages_are_those_of_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch>=2.7",
        'diffusers<0.43,>=0.35; extra == "models"',
        'no-such-package>=1; extra == "fast"',
        'foresample[models]; extra == "all"',
        'pytest>=8; extra == "test"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    pytest.importorskip("diffusers")
    known, unknown = doctor.packages()
    version = metadata.version("diffusers")
    assert known == {"name": "diffusers", "extra": "models", "wanted": "<0.43,>=0.35", "version": version}
    assert (unknown["name"], unknown["extra"], unknown["version"]) == ("no-such-package", "fast", None)


def test_without_the_test_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check", None)
    assert told("--no-test")["tests"] == []


def test_rounds_that_are_not_exact_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken twin that accepts every draft."""
    verify = plain.verify

    def trusting(*given: Any, **speculation: Any) -> Any:
        verdict = verify(*given, **speculation)
        return replace(verdict, accepted=verdict.length)

    monkeypatch.setenv("FORESAMPLE_PLAIN", "1")
    monkeypatch.setattr(plain, "verify", trusting)
    result = invoke("doctor", "--samples", "1000")
    assert result.exit_code == 1
    assert "FAIL  plain rounds on cpu: distribution: " in result.output


def test_a_compiler_that_breaks_is_a_finding_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*given: object) -> None:
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(doctor, "round_for", breaks)
    monkeypatch.setattr("foresample.engine.engine.round_for", breaks)
    result = invoke("doctor", *SMALL)
    assert result.exit_code == 1
    assert "no round works here: ImportError: numba needs another numpy" in result.output
    assert "FAIL  broken rounds on cpu: ImportError: numba needs another numpy" in result.output
