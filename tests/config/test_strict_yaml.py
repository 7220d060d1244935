import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_rl.config.strict_yaml import MAX_BYTES, dump, parse
from moe_rl.errors import ConfigError


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
    value = parse(f"key: {text}\n", "f")[0]["key"]
    assert value == expected and type(value) is type(expected)


def test_infinity_and_nan_are_numbers():
    inf, minus, nan = parse("[.inf, -.Inf, .nan]", "f")[0]
    assert (inf, minus) == (float("inf"), float("-inf")) and nan != nan


def test_lines_of_keys_and_items():
    _, lines = parse("a:\n  b: 1\n  c:\n    - 5\n    - 6\n", "f")
    assert (lines[("a",)], lines[("a", "b")], lines[("a", "c")], lines[("a", "c", 1)]) == (1, 2, 3, 5)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", ["f:4", "a.b", "line 2"]),
        ("a: &x 1\nb: *x\n", ["f:2", "alias"]),
        ("a: !!python/name:os.system ''\n", ["f:1", "tag", "os.system"]),
        ("a: !!int x\n", ["f:1", "'x'"]),
        ("? [a]\n: 1\n", ["f:1", "plain text"]),
        ("a: 1\nb: [1, 2\n", ["f:3", "not valid YAML"]),
        ("a: 1\n---\nb: 2\n", ["f:2", "document"]),
        ('a: 1\nb: "\\udc00"\n', ["f:2", "half a character"]),
        ('"\\udc00": 1\n', ["f:1", "half a character"]),
        ("a: \x00\n", ["f", "not valid YAML"]),
        ("a: " + "9" * 5000, ["f:1", "5000 digits"]),
        ("[" * 20_000, ["f", "nested too deeply"]),
        ("a" * (MAX_BYTES + 1), ["f", str(MAX_BYTES)]),
    ],
)
def test_refusals_name_the_line_and_the_reason(text, parts):
    with pytest.raises(ConfigError) as caught:
        parse(text, "f")
    assert all(part in str(caught.value) for part in parts), str(caught.value)


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
    again = parse(dump({"key": value}), "f")[0]["key"]
    assert again == value and repr(again) == repr(value)
