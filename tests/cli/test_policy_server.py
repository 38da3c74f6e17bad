"""`foresample policy-server`, as far as it goes without LeRobot."""

from __future__ import annotations

import pytest

from foresample.cli import policy_server
from tests.cli.common import refuses


def test_without_lerobot_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_server, "find_spec", lambda name: None)
    refuses("pip install 'lerobot[async]'", "policy-server", "--", "--port=8080")
