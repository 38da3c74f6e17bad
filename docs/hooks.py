"""Hooks of mkdocs: links to files outside of docs/, formulas, and a link to the repository.

These pages are read on a forge as well. There a link that leaves `docs/`, such as `../benchmarks/results/x.json`, leads
to the file. The site copies every such file to `files/`; a link to a folder, which has no page there, becomes text.
"""

from __future__ import annotations

import re
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)\)")
FORMULAS = ("theory.md",)
"""Pages whose indented blocks are formulas."""
INDEX = re.compile(r"([^\W_][\u0300-\u036f']*)_(\{[^}]*\}|[^\W_])")
TOKEN = re.compile(
    r"(?P<name>[^\W\d_][\w\u0300-\u036f']*?(?=_|[^\w\u0300-\u036f']|$))(?:_(?P<index>\{[^}]*\}|[^\W_]))?"
    r"|(?P<number>\d+(?:\.\d+)?)|(?P<space> +)|(?P<sign>.)"
)


def on_config(config: Any) -> Any:
    """Link the repository that this clone came from in the header, if its address can be opened in a browser."""
    git = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True)
    address = re.sub(r"^git@([^:]+):", r"https://\1/", git.stdout.strip()).removesuffix(".git")
    if config.nav and re.match(r"https?://[^@]+$", address):
        config.nav.append({"Repository": address})
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Copy the files that pages link to."""
    texts = [page.content_string for page in files.documentation_pages()]
    wanted = {path for text in texts for _, _, path in OUTSIDE.findall(text)}
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Any = None, **_: Any) -> str:
    """Point links to the copies; a link to a file that does not exist stays as it is, and fails a strict build."""

    def copy_of(match: re.Match[str]) -> str:
        picture, text, path = match.groups()
        if (ROOT / path).is_dir():
            return text
        return f"{picture}[{text}](files/{path})" if (ROOT / path).exists() else match[0]

    return "\n".join(_line(line) for line in OUTSIDE.sub(copy_of, markdown).split("\n"))


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Render formulas as MathML, which browsers draw without a script, and indices within sentences as subscripts."""
    if page.file.src_uri not in FORMULAS:
        return html
    block = r'<div class="highlight"><pre>(?:<span></span>)?<code>(.*?)</code></pre>\s*</div>'
    html = re.sub(block, lambda match: _formulas(unescape(match[1])), html, flags=re.DOTALL)
    parts = re.split(r"(<code\b.*?</code>|<math\b.*?</math>|<[^>]*>)", html, flags=re.DOTALL)
    parts[::2] = [re.sub(INDEX, _subscript, text) for text in parts[::2]]
    return "".join(parts)


def _subscript(match: re.Match[str]) -> str:
    return f"{match[1]}<sub>{match[2].strip('{}')}</sub>"


def _formulas(text: str) -> str:
    lines = [
        f'<math display="block">{_math(line.strip())}</math>' for line in text.splitlines() if line.strip()
    ]
    return f'<div class="formula">{"".join(lines)}</div>'


def _math(text: str) -> str:
    """A formula written with Unicode letters, _ and {}, as MathML."""
    out = ""
    for match in TOKEN.finditer(text):
        name, number, index, space, sign = (
            match["name"],
            match["number"],
            match["index"],
            match["space"],
            match["sign"],
        )
        if name:
            letters = name.rstrip("'²")
            tag = "mi" if len(letters.rstrip("\u0302\u0304")) == 1 else "mtext"
            made = f"<{tag}>{letters}</{tag}>"
            if letters != name:
                made = f"<msup>{made}<mo>{name[len(letters) :].replace('²', '2')}</mo></msup>"
            out += f"<msub>{made}<mrow>{_math(index.strip('{}'))}</mrow></msub>" if index else made
        elif number:
            out += f"<mn>{number}</mn>"
        elif space:
            out += f'<mspace width="{min(2.0, 0.25 * len(space))}em"/>'
        else:
            fence = ' stretchy="false"' if sign in "()[]{}" else ""
            tight = ' lspace="0" rspace="0"' if sign in "‖|/₊" else ""
            out += f"<mo{fence}{tight}>{escape(sign)}</mo>"
    return out


def _line(line: str) -> str:
    """A line as a forge shows it.

    A bar in a table's code has no backslash, an error stays beside its number, and the underscore of x̂_i does not
    begin emphasis.
    """
    if line.startswith("|"):
        return line.replace("\\|", "|").replace(" ± ", "\u00a0±\u00a0")
    return line if line.startswith("    ") else re.sub("(?<=[\u0300-\u036f])_", r"\\_", line)
