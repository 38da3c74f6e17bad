"""`python -m benchmarks.checks`: exit status 1 if an expectation is broken; age is only told."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checks.stale import table

print(table(), flush=True)
raise SystemExit(bool(pytest.main(["-p", "no:cacheprovider", str(Path(__file__).parent)])))
