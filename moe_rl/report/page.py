"""The frame of a report: style for screen in light and dark, for narrow screens and for paper; tiles and figures."""

from __future__ import annotations

from html import escape

from moe_rl.report.figures import Panel

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #1c2430; --soft: #5d6776; --rule: #dfe3e9;
  --good: #1f8a5f; --bad: #c23b37; --blue: #3f7fd9; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b212a; --ink: #e4e8ee;
  --soft: #98a3b3; --rule: #2d3541;
  --good: #4cc38f; --bad: #f0706b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 28px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0; }
.kicker { margin: 0; color: var(--blue); font-weight: 600; letter-spacing: .04em; font-size: 13px; }
.facts { margin: 4px 0 0; color: var(--soft); }
.under, .direction { color: var(--soft); font-size: 13px; margin: 0; }
.warning { border-left: 4px solid var(--bad); padding: 4px 12px; margin: 12px 0 0; }
.tiles { display: grid; grid-template-columns: 1.5fr 1fr 1fr 1fr; gap: 14px; margin-top: 22px; }
.tile, figure, .proof, .config > div { background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; padding: 16px 18px; }
.tile h3 { color: var(--soft); font-size: 13px; font-weight: 600; }
.tile .value { font-size: 21px; font-weight: 650; margin: 4px 0; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile.lead { border-top: 3px solid var(--blue); }
.tile.lead .value { font-size: 32px; line-height: 1.25; }
.arrow { color: var(--soft); font-weight: 400; }
.proof { margin-top: 14px; border-left-width: 5px; }
.proof p { margin: 0; }
.proof.ok { border-left-color: var(--good); }
.proof.bad { border-left-color: var(--bad); }
.proof ul { display: flex; flex-wrap: wrap; gap: 4px 28px; list-style: none; margin: 4px 0; padding: 0;
  font-variant-numeric: tabular-nums; }
.ok { color: var(--good); } .bad { color: var(--bad); }
.proof.ok, .proof.bad { color: var(--ink); }
.plots { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
figure { margin: 0; display: flex; flex-direction: column; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure svg { width: 100%; height: auto; margin: 8px 0; }
figure svg text { font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif !important; }
figcaption { font-size: 14px; }
figure table { margin: 14px 0; }
figcaption.said { margin-top: 14px; font-style: italic; color: var(--soft); }
table { border-collapse: collapse; width: 100%; background: var(--card); font-size: 13.5px; }
table.small { width: auto; }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--rule); vertical-align: top; }
th { color: var(--soft); font-weight: 600; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td code { font-size: 12.5px; overflow-wrap: break-word; }
tr.broken td { color: var(--bad); font-weight: 600; }
.bar { display: inline-block; width: 110px; height: 9px; border-radius: 5px; background: var(--rule);
  overflow: hidden; vertical-align: middle; }
.bar i { display: block; height: 100%; background: #2f9e73; }
.config { columns: 2 420px; column-gap: 14px; }
.config > div { break-inside: avoid; margin-bottom: 14px; }
.config table { width: 100%; background: none; }
.config td { padding: 3px 6px 3px 0; }
.config td code { overflow-wrap: anywhere; }
.config td:first-child { min-width: 9em; }
summary { cursor: pointer; color: var(--soft); margin-bottom: 8px; }
@media (max-width: 860px) { .tiles, .plots { grid-template-columns: minmax(0, 1fr); } .bars { display: none;
  } table { display: block; overflow-x: auto; } }
@media print {
  :root { --page: #fff; --card: #fff; --ink: #000; --soft: #444; --rule: #ccc; --good: #1f8a5f; --bad: #c23b37;
  color-scheme: light; }
  body { font-size: 12px; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  figure, .tile, .proof, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
}
</style>
</head>
<body><main>
@BODY@
</main></body>
</html>
"""


def render(title: str, body: str) -> str:
    """A whole page, self-contained. title: plain text. body: HTML."""
    return _PAGE.replace("@TITLE@", escape(title)).replace("@BODY@", body)


def moved(first: str, second: str) -> str:
    """From one value to another."""
    return f'{first} <span class="arrow">&rarr;</span> {second}'


def tile(name: str, value: str, under: str, *, lead: bool = False) -> str:
    """One number of a page, with what it is above and what it is of below. value: HTML."""
    return (
        f'<div class="tile{" lead" if lead else ""}"><h3>{name}</h3><p class="value">{value}</p>'
        f'<p class="under">{escape(under)}</p></div>'
    )


def figure(panel: Panel) -> str:
    """One plot with its title, its direction and the sentence that reads it."""
    kind = ' class="wide"' if panel.wide else ""
    plot = panel.svg if panel.svg is not None else ""
    said = ' class="said"' if panel.svg is None else ""
    return (
        f'<figure{kind} id="{panel.name}"><h3>{escape(panel.title)}</h3>'
        f'<p class="direction">{escape(panel.direction)}</p>'
        f"{plot}<figcaption{said}>{escape(panel.reading)}</figcaption></figure>"
    )
