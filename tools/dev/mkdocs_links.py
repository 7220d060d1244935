"""Let mkdocs build pages that link to files outside docs/.

A site holds docs/ alone, so such a link leads nowhere there. It becomes its text and the file's path in the repository.
mkdocs.yml names this file as a hook.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)[^)\s]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links out of docs/ in a page's Markdown; mkdocs calls this for each page."""

    def replaced(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[2]))
        return link[0] if target.startswith("docs/") else f"{link[1]} (`{target}`)"

    return LINK.sub(replaced, markdown)
