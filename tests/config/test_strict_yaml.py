import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.config.strict_yaml import MAX_BYTES, dump, parse
from moe_rl.errors import ConfigError
from tests.support.refusals import refused


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-6", 1e-6), ("1.", 1.0), (".5", 0.5), ("-3E+2", -300.0), ("010", 10), ("-7", -7), ("+7", 7),
        ("true", True), ("False", False), ("~", None), ("", None),
        ("no", "no"), ("off", "off"), ("yes", "yes"), ("on", "on"), ("y", "y"),
        ("12:30", "12:30"), ("2026-01-02", "2026-01-02"), ("1_000", "1_000"), ("0x10", "0x10"), ("1e", "1e"),
        ("'1'", "1"), ('"true"', "true"), ("!!str 1", "1"),
    ],
)  # fmt: skip
def test_scalars_of_the_core_schema(text, expected):
    value = parse(f"key: {text}\n", {"file": "f"})[0]["key"]
    assert value == expected and type(value) is type(expected)


def test_infinity_and_nan_are_numbers():
    inf, minus, nan = parse("[.inf, -.Inf, .nan]", {"file": "f"})[0]
    assert (inf, minus) == (float("inf"), float("-inf")) and nan != nan


def test_lines_of_keys_and_items():
    _, lines = parse("a:\n  b: 1\n  c:\n    - 5\n    - 6\n", {"file": "f"})
    assert (lines[("a",)], lines[("a", "b")], lines[("a", "c")], lines[("a", "c", 1)]) == (1, 2, 3, 5)


@pytest.mark.parametrize(
    ("text", "line", "pieces", "facts"),
    [
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", 4, ["line 2"], {"key": "a.b"}),
        ("a: &x 1\nb: *x\n", 2, [], {}),
        ("a: !!python/name:os.system ''\n", 1, ["os.system"], {}),
        ("a: !!int x\n", 1, ["'x'"], {}),
        ("? [a]\n: 1\n", 1, [], {}),
        ("a: 1\nb: [1, 2\n", 3, [], {}),
        ("a: 1\n---\nb: 2\n", 2, [], {}),
        ('a: 1\nb: "\\udc00"\n', 2, ["udc00"], {}),
        ('"\\udc00": 1\n', 1, ["udc00"], {}),
        ("a: \x00\n", "no line", [], {}),
        ("a: " + "9" * 5000, 1, ["5000"], {}),
        ("[" * 20_000, "no line", [], {}),
        ("a" * (MAX_BYTES + 1), "no line", [], {"expected": (MAX_BYTES,)}),
    ],
)
def test_refusals_name_the_line_and_what_stands_there(text, line, pieces, facts):
    with refused(ConfigError, *pieces, file="f", line=line, **facts):
        parse(text, {"file": "f"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
        | st.sampled_from(["no", "off", "1e-6", "1:30", "2026-01-02", "~", "0x1f", "010", "<<", "=", "", " a", "a: b"]),
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
)  # fmt: skip
def test_dump_reads_back_equal(value):
    again = parse(dump({"key": value}), {"file": "f"})[0]["key"]
    assert again == value and repr(again) == repr(value)
