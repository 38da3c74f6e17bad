"""What mkdocs does otherwise than a forge, on which these pages are read as well.

A link that leaves `docs/`, such as `../benchmarks/results/x.json`, leads to the file on a forge. The site takes every
such file along, under `files/`; a folder has no page there, so that of a link to one the text is left.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Take along what pages link to."""
    texts = [page.content_string for page in files.documentation_pages()]
    wanted = {path for text in texts for _, _, path in OUTSIDE.findall(text)}
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead there; what does not exist stays as it is, and fails a strict build."""

    def lead(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        if (ROOT / path).is_dir():
            return text
        return f"{picture}[{text}](files/{path})" if (ROOT / path).exists() else match[0]

    return "\n".join(_line(line) for line in OUTSIDE.sub(lead, markdown).split("\n"))


def _line(line: str) -> str:
    """As a forge shows it: a bar in a table's code has no backslash, an error stays beside its number, and the
    underscore of x̂_i is none of emphasis.
    """
    if line.startswith("|"):
        return line.replace("\\|", "|").replace(" ± ", "\u00a0±\u00a0")
    return line if line.startswith("    ") else re.sub("(?<=[\u0300-\u036f])_", r"\\_", line)
