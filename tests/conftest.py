"""Fixtures of all tests: the same random numbers in every run, and skips for what this machine lacks."""

from __future__ import annotations

import importlib.util
import signal
from contextlib import suppress

import pytest
import torch

# A shell's background job ignores Ctrl-C, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ImportError):  # where only the GPU's tests are run, hypothesis may be missing
    from hypothesis import settings

    settings.register_profile("same every time", derandomize=True, deadline=None)
    settings.load_profile("same every time")

LACKS = {
    "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
    "ray": None if importlib.util.find_spec("ray") else "ray is not installed: pip install 'foresample[ray]'",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, reason in LACKS.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """torch's own generator returns the same numbers in every run and in any order of the tests."""
    torch.manual_seed(0)
