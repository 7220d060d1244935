"""Checks the links in the Markdown files.

Every relative link must lead to a file and to a heading in it, and docs/README.md must link to every page of docs/.

python tools/dev/check_links.py        # all files that git has; exit status 1 where a link leads nowhere
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub makes from the headings of a page."""
    headings = HEADING.findall(re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(root: Path, pages: list[Path]) -> list[str]:
    """Return one line per broken link: the page, the link, and what is missing. Links with a scheme are not checked."""
    found = []
    for page in pages:
        for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
            name, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (page.parent / name).resolve() if name else page
            where = f"{page.relative_to(root)}: {link}"
            if not target.exists():
                found.append(f"{where}: no such file")
            elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
                found.append(f"{where}: no such heading")
    return found


def unlisted_pages(root: Path, pages: list[Path]) -> list[str]:
    """Return one line per page of docs/ that its index does not link to."""
    docs = root / "docs"
    index = docs / "README.md"
    listed = {(docs / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    missing = [page for page in pages if docs in page.parents and page != index and page.resolve() not in listed]
    return [f"{page.relative_to(root)}: docs/README.md has no link to it" for page in missing]


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    pages = [root / name for name in listed.stdout.split("\0") if name and (root / name).exists()]
    found = broken_links(root, pages) + unlisted_pages(root, pages)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
