"""The Triton kernels on a CPU: interpreted.py, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("triton") is None,
        reason="triton, which there is for Linux, is not installed: pip install --no-deps -r tests/packages.txt",
    ),
]


@pytest.mark.parametrize("which", ["not caught", "caught"], ids=["agree", "caught"])
def test_interpreted_kernels(which: str) -> None:
    """They agree with plain PyTorch, and those with one place changed are caught.

    The interpreter is asked for in the environment, before Triton is imported; no other test may see it.
    """
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-k",
        which,
        "tests/kernels/interpreted.py",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "FORESAMPLE_PLAIN": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
