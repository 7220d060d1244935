"""Links of docs/ that lead out of the site."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]


def test_only_links_out_of_docs_become_text():
    spec = importlib.util.spec_from_file_location("mkdocs_links", ROOT / "tools/dev/mkdocs_links.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="howto/plan.md"))
    text = "[a](../../configs/models/README.md#x), [b](../reference/config.md#run), [c](plan.md) and [d](https://e.org/../f)"
    assert hook.on_page_markdown(text, page=page) == (
        "a (`configs/models/README.md`), [b](../reference/config.md#run), [c](plan.md) and [d](https://e.org/../f)"
    )
