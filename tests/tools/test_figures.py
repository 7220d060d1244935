"""Text of the docs quotes the figures of the pictures and tables beside it: `make figures` makes both."""

import re
from statistics import fmean

import pytest

from tools.dev.figures import KIND, PAGES, PRINTED, ROOT, TOOK, picture, quoted_anew, quotes


def test_the_pages_quote_the_run_of_the_picture():
    head, *printed = PRINTED.read_text(encoding="utf-8").splitlines()
    minutes, digest = re.search(r"([\d.]+) minutes; .* (\w+)$", head).groups()
    assert digest == picture(), "the picture is of another run: make figures"
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(quotes(text)) >= 5 and not set(quotes(text)) - {*printed}, page
        assert set(TOOK.findall(text)) <= {minutes}
    assert TOOK.search(PAGES[1].read_text(encoding="utf-8"))


def test_a_page_is_quoted_anew():
    page = "```text\nheld-out after step 0: pass 1%\n 1/40   0.1\n...\n```\nThis run took 3.3 minutes\n"
    printed = ["held-out after step 0: pass 2%", " 1/40   0.2", " 2/40   0.3"]
    assert quoted_anew(page, printed, 4.04) == page.replace("1%", "2%").replace("0.1", "0.2").replace("3.3", "4.0")
    with pytest.raises(SystemExit, match=r"1/40   0\.1"):
        quoted_anew(page, printed[:1], 4.04)
    assert {KIND.match(line)[1] for line in quotes(page)} == {"held-out after step 0", "1/40"}


def test_the_text_about_the_study_says_what_its_table_says():
    cells = re.findall(r"^\| g(?:rp|sp)o \|.*", (ROOT / "docs/generated/stability_study.md").read_text(), re.MULTILINE)
    rows = [[cell.split()[0] for cell in line.strip("| ").split(" | ")] for line in cells]
    text = " ".join((ROOT / "docs/measurements/routing_kl.md").read_text(encoding="utf-8").split())

    def mean(column: int, **chosen: str) -> float:
        """Return the mean of a column over the rows with this mode, or number of updates."""
        at = {"mode": 2, "updates": 1}
        return fmean(
            float(row[column].rstrip("%")) for row in rows if all(row[at[key]] == one for key, one in chosen.items())
        )

    def written(value: float) -> str:
        return f"{value:.1e}".replace("e-0", "e-")

    assert len(rows) == 18
    with_r3, without = ([mean(column, mode=mode) for column in (3, 4)] for mode in ("R3", "none"))
    assert f"mean KL is {written(with_r3[0])} instead of {written(without[0])} nats a token" in text
    assert f"mean F(2) {written(with_r3[1])} instead of {written(without[1])}" in text
    rates = [f"{mean(5, updates=updates):.0f}%" for updates in ("4", "1", "2")]
    assert "pass rates are {} with 4, {} with 1 and {} with 2".format(*rates) in text
