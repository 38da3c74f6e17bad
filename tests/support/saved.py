"""One small result file of each kind that commands and `benchmarks.mixture` write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ORIGIN: dict[str, Any] = {
    "command": "foresample something --seed 1",
    "commit": "0123abc",
    "versions": {"foresample": "0.1.0", "python": "3.11.0", "torch": "2.7.0"},
    "machine": {"cpu": "x86_64", "threads": 2, "gpu": "NVIDIA H200"},
}
BENCH = {
    "kind": "bench",
    **ORIGIN,
    "settings": {"target": "a mixture", "dim": 4, "churn": 0.1, "steps": 30, "samples": 9, "reuse": "v"},
    "rows": [
        {
            "method": method,
            "window": window,
            "speedup": speedup + window / 100,
            "speedup_error": 0.02,
            "calls": 30 / speedup,
            "evaluations": 90.0,
            "accepted": speedup - 1,
            "seconds": 1.0,
        }
        for window in (5, 14)
        for method, speedup in (("reflection-nearest", 2.0), ("somebody-elses", 1.5), ("default", 3.0))
    ],
}
FRONTIER = {
    "kind": "frontier",
    **ORIGIN,
    "settings": {"target": "flow"},
    "tunings": [
        {
            "steps": 30,
            "slots": slots,
            "step_seconds": 0.001 * slots**0.5,
            "trials": [
                {
                    "window": 8,
                    "states": 9 * slots,
                    "call_seconds": 0.001,
                    "round_seconds": 0.002 * slots**0.9,
                    "calls": 6.0,
                    "gain": 2.5 / slots**0.4,
                    "calls_p95": 8.0,
                }
            ],
            "window": 8 if slots == 1 else None,
            "achieved": 2.25 if slots == 1 else None,
        }
        for slots in (1, 64)
    ],
}
CHECK = {
    "kind": "check",
    **ORIGIN,
    "settings": {"target": "flow"},
    "passed": True,
    "level": 0.001,
    "findings": [
        {"question": "rows are independent", "passed": True, "detail": "they are"},
        {"question": "law", "passed": True, "detail": "70 tests", "tests": 70, "smallest_p": 0.031},
    ],
}
DATASET = {
    "kind": "dataset",
    "settings": {
        "count": 40,
        "shard": 20,
        "seed": 0,
        "labels": None,
        "shape": [1, 28, 28],
        "dtype": "float32",
        "steps": 16,
        "std": "abc",
        "window": 8,
        "method": "replay",
        "model": "fashion_mnist",
    },
    "runs": [
        {
            **ORIGIN,
            "started": "2025-01-01T00:00:00+00:00",
            "found": 0,
            "drawn": None,
            "seconds": None,
            "peak_mib": None,
        },
        {
            **ORIGIN,
            "started": "2025-01-02T00:00:00+00:00",
            "found": 20,
            "drawn": 19,
            "seconds": 1.5,
            "peak_mib": 99.0,
        },
    ],
    "law": None,
    "shards": [
        {"file": f"shard-0000{i}.safetensors", "samples": n, "sha256": "0"} for i, n in ((0, 20), (1, 19))
    ],
    "failures": [{"index": 7, "seed": 99, "step": 3, "error": "NaN at step 3"}],
    "costs": {
        "samples": 39,
        "calls": 200,
        "evaluations": 1000,
        "calls_mean": 5.13,
        "evaluations_mean": 25.6,
        "accepted_mean": 2.1,
        "speedup": 3.12,
    },
}
FILES: dict[str, dict[str, Any]] = {
    "mixture.json": BENCH,
    "frontier.json": FRONTIER,
    "check.json": CHECK,
    "data/manifest.json": DATASET,
}
"""A folder with one of each, at names of no meaning."""


def save(folder: Path, files: dict[str, Any]) -> Path:
    """The folder with these results in it."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(data if isinstance(data, str) else json.dumps(data))
    return folder
