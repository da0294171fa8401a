"""Adds the pages of the site that lie outside docs/: README.md as its first one, the changelog and
the licence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "LICENSE": "LICENSE.md"}
LINKS = {"](docs/": "](", "](../README.md": "](index.md", "](LICENSE)": "](LICENSE.md)"}


def on_files(files: Files, *, config: Any) -> Files:
    """mkdocs calls it with the files of docs/."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs calls it with each page: links lead to where the pages lie in the site."""
    for old, new in LINKS.items():
        markdown = markdown.replace(old, new)
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """mkdocs calls it with each page as HTML: a bar in a table keeps its backslash in code, which
    GitHub takes out.
    """
    return html.replace("\\|", "|")
