"""Hooks with which mkdocs builds the site of docs/; mkdocs.yml names this file.

The navigation is made from the index, docs/README.md. A site holds docs/ alone, so a link to another file of the
repository becomes its text and that file's path.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)[^)\s]*\)")
HEADING = re.compile(r"^## (.+)$")
# Wide tables and lines scroll by themselves. The theme switches two style sheets on and off, and fails without them.
HEAD = (
    "<style>table { display: block; overflow-x: auto } code { overflow-wrap: anywhere }</style>"
    '<style id="hljs-light"></style><style id="hljs-dark"></style></head>'
)
ENTRY = re.compile(r"\[([^\]]+)\]\(([^)#]+)\)")


def navigation(index: str) -> list[dict[str, Any]]:
    """Return mkdocs' nav: the index itself, then its headings with the pages of docs/ that are listed under each.

    An entry of a list says what a reader wants, then links to the page. A page stands where it is first.
    """
    nav: list[dict[str, Any]] = [{"Docs": "README.md"}]
    pages: list[dict[str, str]] = []
    seen = set()
    for line in index.splitlines():
        if heading := HEADING.match(line):
            pages = []
            nav.append({heading[1]: pages})
        elif line.startswith("- "):
            for text, target in ENTRY.findall(line):
                if not target.startswith("..") and target not in seen:
                    seen.add(target)
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


def on_post_page(output: str, **_: Any) -> str:
    """Add what the theme's own head lacks. mkdocs calls this for each page."""
    return output.replace("</head>", HEAD, 1)
