"""The navigation of the site, and links of docs/ that lead out of it."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "tools/dev/mkdocs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_is_the_index(hooks):
    index = "[it](../README.md)\n\n## A\n\n- do so: [one](a/1.md)\n- or: [out](../C.md), [two](2.md)\n\n## B\n"
    index += "\n- [1](a/1.md)\n"
    assert hooks.navigation(index) == [
        {"Docs": "README.md"},
        {"A": [{"one": "a/1.md"}, {"two": "2.md"}]},
        {"B": []},
    ]


def test_the_navigation_has_every_page(hooks):
    nav = hooks.navigation((ROOT / "docs/README.md").read_text(encoding="utf-8"))
    shown = [path for section in nav[1:] for pages in section.values() for page in pages for path in page.values()]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(["README.md", *shown]) == sorted(pages)


def test_only_links_out_of_docs_become_text(hooks):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="howto/plan.md"))
    text = "[a](../../configs/models/README.md#x), [b](../generated/config.md#run), [c](plan.md) and [d](https://e.org/../f)"
    assert hooks.on_page_markdown(text, page=page) == (
        "a (`configs/models/README.md`), [b](../generated/config.md#run), [c](plan.md) and [d](https://e.org/../f)"
    )


def test_the_theme_finds_the_style_sheets_that_its_colours_switch(hooks):
    head = hooks.on_post_page("<head></head><body>")
    assert head.index('id="hljs-light"') < head.index('id="hljs-dark"') < head.index("</head><body>")
