"""What mkdocs does otherwise than a forge, on which these pages are read as well.

A link that leaves `docs/`, such as `../benchmarks/results/x.json`, leads to the file on a forge. The site takes every
such file along, under `files/`; a folder has no page there, so that of a link to one the text is left.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)\)")


class Underscores(Extension):
    """Formulas have underscores, x̂_{i} among them; emphasis has asterisks."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.inlinePatterns.deregister("em_strong2", strict=False)


def on_config(config: Any) -> Any:
    config.markdown_extensions.append(Underscores())
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Take along what pages link to."""
    texts = [page.content_string for page in files.documentation_pages()]
    wanted = {path for text in texts for _, _, path in OUTSIDE.findall(text)}
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead there; what does not exist stays as it is, and fails a strict build. Errors stay beside their numbers."""

    def lead(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        if (ROOT / path).is_dir():
            return text
        return f"{picture}[{text}](files/{path})" if (ROOT / path).exists() else match[0]

    markdown = OUTSIDE.sub(lead, markdown)
    in_tables = re.compile(r"^\|.*$", re.MULTILINE)  # a bar in code needs no backslash here
    return in_tables.sub(lambda row: row[0].replace("\\|", "|").replace(" ± ", "\u00a0±\u00a0"), markdown)
