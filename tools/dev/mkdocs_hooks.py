"""Hooks with which mkdocs builds the site of docs/; mkdocs.yml names this file.

The navigation is made from the index, docs/README.md. A site holds docs/ alone, so a link to another file of the
repository becomes its text and that file's path.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)[^)\s]*\)")
ENTRY = re.compile(r"^## (.+)$|^- \[([^\]]+)\]\(([^)]+)\)", re.MULTILINE)


def navigation(index: str) -> list[dict[str, Any]]:
    """Return mkdocs' nav: the index itself, then its headings with the pages of docs/ that are listed under each."""
    nav: list[dict[str, Any]] = [{"Docs": "README.md"}]
    pages: list[dict[str, str]] = []
    for heading, text, target in ENTRY.findall(index):
        if heading:
            pages = []
            nav.append({heading: pages})
        elif not target.startswith(".."):
            pages.append({text: target})
    return nav


def on_config(config: Any) -> Any:
    """Fill in the navigation. mkdocs calls this once it has read mkdocs.yml."""
    config.nav = navigation(Path(config.docs_dir, "README.md").read_text(encoding="utf-8"))
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links out of docs/ in a page's Markdown. mkdocs calls this for each page."""

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[2]))
        return link[0] if target.startswith("docs/") else f"{link[1]} (`{target}`)"

    return LINK.sub(replaced, markdown)
