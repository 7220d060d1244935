"""Tests that the page of all config keys matches the schema and describes each key."""

from pathlib import Path

from moe_rl.config.schema_reference import reference
from moe_rl.config.section import Section

ROOT = Path(__file__).resolve().parents[2]


def sections(above=Section):
    for section in above.__subclasses__():
        yield section
        yield from sections(section)


def test_the_page_is_what_the_schema_says():
    written = (ROOT / "docs/generated/config.md").read_text()
    assert written == reference(), "run: make generated"


def test_every_key_is_on_the_page_with_its_meaning():
    lines, keys = reference().splitlines(), 0
    for section in sections():
        for key, field in section.model_fields.items():
            if section.__name__ == "Config":
                assert f"## {key}" in lines
            elif key != "name":
                keys += 1
                meaning = " ".join((field.description or "").split())
                assert meaning and any(line.startswith(f"| `{key}` |") and meaning in line for line in lines), key
    assert keys > 150


def test_bounds_defaults_and_choices_are_said():
    page = reference()
    for row in (
        "| `top_p` | number above 0.0 to 1.0 | `1.0` |",
        "| `dtype` | `bfloat16` or `float32` | `bfloat16` |",
        "| `published` | path, or null | `null` |",
        "`clip_high` required, usually `0.28`",
        "| `betas` | list of 2: number from 0.0 below 1.0 | `[0.9, 0.95]` |",
        "| `group_size` | whole number from 2 to 65536 | required |",
    ):
        assert row in page
