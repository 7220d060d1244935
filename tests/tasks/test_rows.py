"""The same rows are the same from JSONL, Parquet and data sets, and so are their prompts."""

import csv
import json
import math
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from moe_rl.config.check_files import count_prompts
from moe_rl.config.prompt_sources import PromptSourceConfig
from moe_rl.errors import DataError
from moe_rl.tasks.rows import plain_json, read_rows
from moe_rl.tasks.tokenizer import ChatTemplate
from tests.support.refusals import refused

TOOL_POLICY = Path(__file__).parents[2] / "assets/tiny_tool/policy"


def source(file):
    return PromptSourceConfig(name="rows", data=str(file), split="train" if Path(file).name == "files" else None)


def rows_of(file, left_out=None):
    return [row for _, row in read_rows(source(file), "task.train.0", set() if left_out is None else left_out)]


def as_jsonl(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


def as_parquet(folder, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def saved(folder, rows):
    import datasets

    datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(folder / "saved")
    return folder / "saved"


def as_folder(folder, rows):
    (folder / "files").mkdir()
    as_jsonl(folder, rows).rename(folder / "files/train.jsonl")
    return folder / "files"


@pytest.fixture
def offline(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def called(arguments, **message):
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **message}


def dialogue(arguments, **message):
    user, result = {"role": "user", "content": "Look."}, {"role": "tool", "content": "Seen."}
    return [user, called(arguments, **message), result]


def tool(name, properties, **more):
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


ROWS = [
    {
        "prompt": dialogue({"city": "Oslo", "near": {"km": 5}}, content=None),
        "schemas": [tool("look", {"city": {"type": "string", "default": None}}), tool("end", {})],
        "answer": "7",
        "info": {"level": 1, "unit": None},
        "hint": None,
        "hints": ["a", None],
    },
    {
        "prompt": dialogue({"a": 2, "b": 2.5}, content="I look."),
        "schemas": [tool("add", {"b": {"enum": ["x", None]}}, strict=True)],
        "answer": None,
        "info": {"level": 2.5},
        "hint": "h",
        "hints": [],
    },
    {"prompt": dialogue({}), "schemas": [], "answer": "8", "hints": None},
]
PLAIN = [
    {
        "prompt": dialogue({"city": "Oslo", "near": {"km": 5}}),
        "schemas": [tool("look", {"city": {"type": "string"}}), tool("end", {})],
        "answer": "7",
        "info": {"level": 1},
        "hints": ["a", None],
    },
    {
        "prompt": dialogue({"a": 2, "b": 2.5}, content="I look."),
        "schemas": [tool("add", {"b": {"enum": ["x", None]}}, strict=True)],
        "info": {"level": 2.5},
        "hint": "h",
        "hints": [],
    },
    {"prompt": dialogue({}), "schemas": [], "answer": "8"},
]


@pytest.mark.parametrize("write", [as_jsonl, as_parquet, saved, as_folder])
def test_the_same_rows_from_every_source(tmp_path, offline, write):
    assert rows_of(write(tmp_path, ROWS)) == PLAIN


@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_cell_of_csv_is_text(tmp_path, offline, kind):
    rows = [
        {
            "prompt": "a",
            "answer": "007",
            "price": "1.10",
            "formula": "NA",
            "right": "True",
            "said": 'one, "two"\nthree',
        },
        {"prompt": "b", "answer": "12", "price": "2", "formula": "None", "right": "", "said": "1e5"},
    ]
    (tmp_path / "files").mkdir()
    with (tmp_path / "files" / f"train.{kind}").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t" if kind == "tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    del rows[1]["right"]  # an empty cell is absent
    assert rows_of(tmp_path / "files") == rows


def test_files_that_do_not_fit_together_are_told_with_their_columns(tmp_path, offline):
    (tmp_path / "files").mkdir()
    for number, columns in enumerate(("prompt,answer", "prompt,solution")):
        (tmp_path / "files" / f"train-{number}.csv").write_text(f"{columns}\na,b\n")
    with refused(DataError, "solution", fault="data set", key="task.train.0"):
        rows_of(tmp_path / "files")


@pytest.mark.long
def test_a_prompt_shows_no_key_that_the_row_does_not_have(tmp_path):
    rows = rows_of(as_parquet(tmp_path, ROWS))
    template = ChatTemplate(TOOL_POLICY, None)
    first, second, _ = (template.render(template.messages(row["prompt"])) for row in rows)
    assert '{"city": "Oslo", "near": {"km": 5}}' in first and '{"a": 2, "b": 2.5}' in second


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)
# Where a column holds integers and floats, pyarrow takes integers of at most 2^53.
numbers = st.one_of(st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False))
objects = st.fixed_dictionaries(
    {},
    optional={
        "n": st.none() | numbers,
        "text": st.none() | texts,
        "list": st.none() | st.lists(st.none() | texts, max_size=2),
        "objects": st.lists(st.fixed_dictionaries({}, optional={"x": st.none() | numbers, "y": texts}), max_size=2),
        "in": st.none() | st.fixed_dictionaries({}, optional={"deep": st.none() | st.booleans(), "n": numbers}),
    },
)


@pytest.mark.parametrize("write", [as_parquet, pytest.param(saved, marks=pytest.mark.long)])
@given(arguments=st.lists(objects, min_size=1, max_size=4), content=st.none() | texts, data=st.data())
@settings(deadline=None, max_examples=60)
def test_any_rows_are_the_same_from_a_table(tmp_path_factory, write, arguments, content, data):
    rows = [{"n": n, "prompt": dialogue(one, content=content), "more": one} for n, one in enumerate(arguments)]
    ordered = json.loads(json.dumps(rows), object_pairs_hook=lambda pairs: dict(sorted(pairs)))
    for row in ordered:
        for name in data.draw(st.sets(st.sampled_from(["more", "prompt"]))):
            row[name] = None
    folder = tmp_path_factory.mktemp("rows")
    given_as_lines = rows_of(as_jsonl(folder, ordered))
    # A file of Parquet cannot hold an object without any key, and a table none that it always lacks.
    table = pyarrow.Table.from_pylist([{"n": 0, "more": FULL, "prompt": dialogue(FULL, content="")}, *ordered])
    parquet.write_table(table, folder / "rows.parquet")
    if write is saved:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset(table).save_to_disk(folder / "saved")
    found = rows_of(folder / ("saved" if write is saved else "rows.parquet"))[1:]
    assert found == given_as_lines
    assert json.dumps(found, sort_keys=True) == json.dumps(given_as_lines, sort_keys=True)  # 1 and 1.0 are not equal


FULL = {"n": 0.5, "text": "", "list": [""], "objects": [{"x": 0.5, "y": ""}], "in": {"deep": True, "n": 0.5}}


def test_numbers_of_a_row(tmp_path):
    columns = {"whole": 3.0, "large": 2.0**60, "id": 2**63 - 1, "part": 0.1, "zero": -0.0}
    for write in (as_jsonl, as_parquet):
        [row] = rows_of(write(tmp_path, [columns]))
        assert row == {"whole": 3, "large": 2.0**60, "id": 2**63 - 1, "part": 0.1, "zero": 0}
        assert [type(value) for value in row.values()] == [int, float, int, float, int]
    [row] = rows_of(as_parquet(tmp_path, [{"price": Decimal("1.50"), "count": Decimal("2.00")}]))
    assert row == {"price": 1.5, "count": 2} and isinstance(row["count"], int)


def test_values_that_json_does_not_have_are_left_out_and_named(tmp_path):
    left_out = set()
    (tmp_path / "rows.jsonl").write_text('{"a": 1, "nan": NaN, "deep": {"x": [1e999]}}\n')
    assert rows_of(tmp_path / "rows.jsonl", left_out) == [{"a": 1}] and left_out == {"nan", "deep"}
    table = [{"a": 1, "nan": math.nan, "image": b"png", "when": datetime(2026, 1, 2), "deep": {"x": [math.inf]}}]
    left_out = set()
    assert rows_of(as_parquet(tmp_path, table), left_out) == [{"a": 1}]
    assert left_out == {"nan", "image", "when", "deep"}


def test_columns_of_other_types(tmp_path):
    kinds = {
        "map": pyarrow.array([[("city", "Oslo"), ("unit", None)]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
        "word": pyarrow.array(["x"]).dictionary_encode(),
        "json": pyarrow.ExtensionArray.from_storage(pyarrow.json_(pyarrow.string()), pyarrow.array(['{"a": [1.0]}'])),
    }
    parquet.write_table(pyarrow.table(kinds), tmp_path / "rows.parquet")
    assert rows_of(tmp_path / "rows.parquet") == [{"map": {"city": "Oslo"}, "word": "x", "json": {"a": [1]}}]


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b'{"a": 1}\n{"a": 2}\n\n', 2),
        (b'{"a": 1}\n\n \t\n{"a": 2}', 2),
        (b'\n\r\n{"a": 1}\r\n{"a": 2}\r\n\r\n', 2),
        (b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n', 2),
        (b'\xef\xbb\xbf\n{"a": 1}\n', 1),
        ('{"a": "x\u2028y\u2029z\x85"}\n{"a": 2}\n'.encode(), 2),
        (b"", 0),
        (b"\n \n", 0),
        (b"\xef\xbb\xbf", 0),
    ],
)
def test_blank_lines_are_no_rows_for_whoever_reads_or_counts(tmp_path, content, rows):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content)
    found = rows_of(file)
    assert count_prompts([source(file)]) == [rows] == [len(found)]
    assert all(isinstance(row, dict) for row in found)


def test_a_blank_line_keeps_the_numbers_of_the_others(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\n{"a": 1}\n\n{')
    found = read_rows(source(tmp_path / "rows.jsonl"), "task.train.0", set())
    assert [(where["line"], isinstance(row, ValueError)) for where, row in found] == [(2, False), (4, True)]


def test_a_missing_file(tmp_path):
    with refused(DataError, fault="unreadable", key="task.train.0"):
        rows_of(tmp_path / "absent.jsonl")


@pytest.mark.parametrize("text", ["{", '{"a": 1, "a": 2}', '"\\ud800"', "NaN", "deep"])
def test_a_text_that_is_no_value_of_a_row(text):
    with pytest.raises(ValueError):
        plain_json("[" * 3000 + "]" * 3000 if text == "deep" else text)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"prompt": "a"} {"prompt": "b"}', "not JSON: Extra data at character 17"),
        ('{"prompt": "a", "answer": %s}' % ("1" * 5000), "an integer has too many digits"),
        ('{"prompt": %s}' % ("[" * 5000 + "]" * 5000), "JSON that is nested too deeply"),
        ('{"prompt": "a", "prompt": "b"}', "a key occurs twice"),
    ],
    ids=["two", "digits", "nesting", "twice"],
)
def test_what_is_wrong_with_a_line_is_told_without_another_number_of_a_line(tmp_path, line, told):
    (tmp_path / "rows.jsonl").write_text(line + "\n")
    [fault] = rows_of(tmp_path / "rows.jsonl")
    assert isinstance(fault, ValueError) and str(fault) == told


def test_a_column_that_occurs_twice_is_refused(tmp_path):
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"]), tmp_path / "rows.parquet")
    with refused(DataError, "a column occurs twice"):
        rows_of(tmp_path / "rows.parquet")


def test_a_text_of_a_table_that_is_not_utf8_is_told_with_its_row(tmp_path):
    texts = [pyarrow.array([b"a", b"b", b"\xff", b"d", None]).view(pyarrow.string())]
    texts.append(pyarrow.array([["a"], ["b"], ["c"], ["d"], ["e"]]))
    parquet.write_table(pyarrow.Table.from_arrays(texts, names=["prompt", "more"]), tmp_path / "rows.parquet")
    rows = [*read_rows(source(tmp_path / "rows.parquet"), "task.train.0", set())]
    assert [where["row"] for where, _ in rows] == [0, 1, 2, 3, 4]
    (where, fault), whole = rows.pop(2), [row for _, row in rows]
    assert whole == [*({"prompt": text, "more": [text]} for text in ("a", "b", "d")), {"more": ["e"]}]
    assert where["file"] == str(tmp_path / "rows.parquet") and isinstance(fault, ValueError) and "utf-8" in str(fault)
