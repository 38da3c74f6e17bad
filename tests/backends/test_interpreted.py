"""The Triton kernels on a CPU: interpreted.py and compiled.py, in processes of their own."""

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


def run(*arguments: str, **environment: str) -> None:
    """Run pytest in a new process, whose environment is set before Triton is imported."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("which", ["not caught", "caught"], ids=["agree", "caught"])
def test_interpreted_kernels(which: str) -> None:
    """The kernels agree with plain PyTorch, and kernels with one change are caught.

    The interpreter is asked for in the environment, before Triton is imported; no other test may see it.
    """
    run("-k", which, "tests/backends/interpreted.py", TRITON_INTERPRET="1", FORESAMPLE_PLAIN="1")


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    run("tests/backends/compiled.py", TRITON_CACHE_DIR=str(tmp_path))
