"""One small result file of each kind that commands write."""

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
RUN = {
    "method": "replay",
    "steps": 100,
    "count": 64,
    "window": 8,
    "calls_mean": 20.5,
    "calls_error": 0.25,
    "evaluations_mean": 150.0,
    "speedup": 4.878,
    "speedup_error": 0.06,
    "accepted_mean": 3.9,
    "accepted_lengths": [10, 20, 30, 5],
    "mismatch": [None, 0.0, 0.25, 0.5],
    "seconds": 2.0,
    "target_seconds": 1.5,
}
SAMPLE = {
    "kind": "sample",
    **ORIGIN,
    "settings": {"model": "fashion_mnist", "seed": 0, "labels": ["coat", "bag"]},
    "speculative": RUN,
    "sequential": {"calls_mean": 100, "seconds_estimated": 3.0},
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
TUNE = {
    "kind": "tune",
    **ORIGIN,
    "settings": {"target": "flow"},
    "steps": 30,
    "slots": 1,
    "step_seconds": 0.001,
    "trials": [
        {
            "window": window,
            "states": window + 1,
            "call_seconds": 0.001,
            "round_seconds": 0.002,
            "calls": calls,
            "gain": 30 / calls / 2,
        }
        for window, calls in ((4, 10.0), (8, 6.0))
    ],
    "window": 8,
    "achieved": 2.25,
    "predicted": 2.5,
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
LAW = {
    "passed": False,
    "tests": 9,
    "smallest_p": 1e-9,
    "worst": "norm",
    "level": 0.001,
    "samples": 40,
    "sequential": 40,
}
FILES = {
    "a/report.json": SAMPLE,
    "mixture.json": BENCH,
    "tune.json": TUNE,
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
