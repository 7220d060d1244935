"""Each file of examples/ is the text of a block of the docs, which `make docs-test` runs there."""

from tools.dev.docs_blocks import ROOT, blocks, docs


def test_every_example_is_a_block_that_the_docs_run():
    shown = {block.text for page in docs() for block in blocks(str(page), page.read_text()) if block.language != "text"}
    files = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml"))
    assert len(files) >= 6
    assert [path.name for path in files if path.read_text() not in shown] == []
