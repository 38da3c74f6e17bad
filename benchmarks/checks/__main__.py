"""`python -m benchmarks.checks`: a table of all results, then their tests; exit status 1 if one fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checks.stale import table

print(table(), flush=True)
raise SystemExit(bool(pytest.main(["-p", "no:cacheprovider", str(Path(__file__).parent)])))
