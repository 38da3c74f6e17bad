"""Text from elsewhere, made safe to print: a file's words, a class's name, a path, another library's error."""

from __future__ import annotations


def printable(text: object) -> str:
    """The text with every character escaped that is not meant to be seen.

    Control characters (a terminal obeys them), line breaks, marks that turn the reading direction, and half
    characters of names that are not valid UTF-8 (printing them fails).
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
