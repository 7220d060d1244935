"""Makes the pictures of the docs anew, with the text that quotes them: `make figures`.

    python -m tools.dev.figures                # all parts, about 40 minutes on two cores
    python -m tools.dev.figures demo overlap   # these only

    demo      trains the demo; docs/report.png shows its report, and README.md and docs/quickstart.md quote what it
              printed, which docs/generated/demo.txt keeps. Needs a Chromium on PATH.
    overlap   docs/measurements/overlap.png, from benchmarks/overlap.py
    study     table and plots of docs/generated/stability_study.md, from 54 runs, and the table of adapter_study.md,
              from 20; an interrupted call continues

tests/tools/test_figures.py compares the quoted figures with these files.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import xxhash
from PIL import Image

from tools.dev.docs_blocks import blocks

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs/report.png"
PRINTED = ROOT / "docs/generated/demo.txt"
PAGES = (ROOT / "README.md", ROOT / "docs/quickstart.md")
TOOK = re.compile(r"(?<=This run took )[\d.]+(?= minutes)")
KIND = re.compile(r"\s*(run folder|starting|version 0|held-out after step \d+|step|\d+/\d+|report)\b")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def quotes(page: str) -> list[str]:
    """Return the lines of a page that quote the demo's output, without the dots for lines left out."""
    quoting = (one.text for one in blocks("", page) if one.language == "text" and "held-out after step" in one.text)
    return [line for text in quoting for line in text.splitlines() if line != "..."]


def quoted_anew(page: str, printed: list[str], minutes: float) -> str:
    """Return the page with each quoted line as this run printed it."""
    kinds = {found[1]: line for line in printed if (found := KIND.match(line))}
    for line in quotes(page):
        found = KIND.match(line)
        if found is None or found[1] not in kinds:
            raise SystemExit(f"the demo printed no line like this one, which a page quotes: {line}")
        page = page.replace(f"{line}\n", f"{kinds[found[1]]}\n")
    return TOOK.sub(f"{minutes:.1f}", page)


def demo() -> None:
    """Train the demo, take the picture of its report, and quote what it printed."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"no browser takes the picture of the report: put one of {', '.join(BROWSERS)} on PATH")
    began = time.monotonic()
    train = [sys.executable, "-m", "moe_rl", "train", "--ranks", "2", "--config", "configs/tiny_moe_cpu.yaml"]
    done = subprocess.run(train, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    minutes = (time.monotonic() - began) / 60
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    report = ROOT / printed[-1].removeprefix("report: ")
    window = [f"--screenshot={PICTURE}", "--window-size=1200,2250", "--hide-scrollbars"]
    shot = [browser, "--headless", "--no-sandbox", *window, report.as_uri()]
    subprocess.run(shot, check=True, stderr=subprocess.DEVNULL)  # it complains about a desktop that is not there
    Image.open(PICTURE).quantize(128).save(PICTURE, optimize=True)  # a third of the bytes
    head = f"`make figures` writes this. {minutes:.1f} minutes; xxh3 of docs/report.png: {picture()}"
    PRINTED.write_text("\n".join([head, *printed]) + "\n", encoding="utf-8")
    for page in PAGES:
        page.write_text(quoted_anew(page.read_text(encoding="utf-8"), printed, minutes), encoding="utf-8")


def picture() -> str:
    return xxhash.xxh3_64(PICTURE.read_bytes()).hexdigest()


def overlap() -> None:
    """Record a layer with and without rows in flight, and draw it."""
    drawn = ["benchmarks/overlap.py", "--picture", "docs/measurements/overlap.png"]
    subprocess.run([sys.executable, *drawn], cwd=ROOT, check=True)


def study() -> None:
    """Make the 54 runs of the stability study, its table and its plots, and the 20 runs of the study of adapters."""
    named = subprocess.run(["git", "rev-parse", "--short", "HEAD:moe_rl"], cwd=ROOT, check=True, capture_output=True)
    for script, work in (("stability_study", "study"), ("adapter_study", "adapter_study")):
        folder = f"runs/{work}-{named.stdout.decode().strip()}"  # an interrupted call goes on, on the same code
        written = [f"benchmarks/{script}.py", "--work", folder, "--write", "docs/generated"]
        subprocess.run([sys.executable, *written], cwd=ROOT, check=True)


PARTS = {"demo": demo, "overlap": overlap, "study": study}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.dev.figures", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"parts to make: {', '.join(PARTS)} (default: all)")
    for part in parser.parse_args().parts or PARTS:
        if part not in PARTS:
            parser.error(f"{part} is no part; expected {', '.join(PARTS)}")
        PARTS[part]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
