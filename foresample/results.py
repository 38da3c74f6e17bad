"""Result files: JSON objects that say what they are (`kind`), where they come from, and what was found.

Every command writes its findings through `make_result` and `write_result`; the page, the tables and the plots read them
through the typed reader below.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foresample.provenance import provenance


def make_result(kind: str, settings: dict[str, Any], **content: Any) -> dict[str, Any]:
    """A result of this kind: its origin, what it was made with, and what was found."""
    return {"kind": kind, **provenance(), "settings": settings, **content}


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Save a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
