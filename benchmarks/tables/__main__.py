"""Writes the figures into README and docs: `python -m benchmarks.tables`."""

from benchmarks.tables import filled, pages

if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text()))
