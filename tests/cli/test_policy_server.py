"""`foresample policy-server`, as far as it goes without LeRobot's own dependencies."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from foresample.cli import options, policy_server
from foresample.integrations.policies.server import accelerated_server
from tests.cli.common import refuses

INSTALL = "is not installed: pip install 'lerobot[async]'"


@pytest.mark.parametrize("name", ["lerobot", "grpc"])
def test_without_lerobot_or_its_server_it_names_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda other: None if other == name else find_spec(other))
    refuses(f"the policy server needs {name}, which {INSTALL}", "policy-server", "--", "--port=8080")


def test_without_lerobot_s_dependencies_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeRobot installed with --no-deps: its server imports `datasets`, which our server does not need."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == "datasets":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with mock.patch.dict(sys.modules):
        for name in [n for n in sys.modules if n.partition(".")[0] == "lerobot"]:
            del sys.modules[name]
        refuses(f"the policy server needs datasets, which {INSTALL}", "policy-server", "--", "--port=8080")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1.2.3", "::1", "[::1]"])
def test_a_server_that_only_this_machine_reaches_starts_without_a_warning(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served(host).host == host
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "192.168.0.3", "robot.local", ""])
def test_a_server_that_others_reach_warns_in_one_line(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert served(host).host == host
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: LeRobot's server unpickles what it receives")
    assert f"reaches {host} over" in line
    assert "--host=127.0.0.1" in line


def served(host: str) -> SimpleNamespace:
    """A server of LeRobot's interface, as far as it is made with a configuration."""

    class Server:
        def __init__(self, config: SimpleNamespace) -> None:
            self.config = config

    return accelerated_server(Server)(SimpleNamespace(host=host)).config


@pytest.mark.parametrize("window", ["8", "auto"])
def test_the_window_is_given_to_accelerate_as_other_commands_read_it(
    window: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}
    module = SimpleNamespace(PolicyServer=object, serve=lambda: None)
    monkeypatch.setitem(sys.modules, "lerobot.async_inference", SimpleNamespace(policy_server=module))
    monkeypatch.setattr(policy_server, "accelerated_server", lambda server, **options: given.update(options))
    monkeypatch.setattr(sys, "argv", ["foresample"])
    policy_server.run(options.PolicyServer(window=window))
    assert given["window"] == (8 if window == "8" else "auto")


def test_a_missing_prior_and_a_graph_without_a_gpu_are_refused_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = SimpleNamespace(PolicyServer=object, serve=lambda: pytest.fail("it starts"))
    monkeypatch.setitem(sys.modules, "lerobot.async_inference", SimpleNamespace(policy_server=module))
    refuses("none cannot be read (No such file", "policy-server", "--prior", tmp_path / "none")
    (tmp_path / "prior").write_text("nothing")
    refuses("prior is no safetensors file", "policy-server", "--prior", tmp_path / "prior")
    refuses("--graph needs a GPU, and torch sees none", "policy-server", "--graph")
