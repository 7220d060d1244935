"""Prompts of a large file are kept beside it, and are the same as those that are read."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from moe_rl.config.load import load_config
from moe_rl.errors import DataError
from moe_rl.tasks import prompt_file
from moe_rl.tasks.prompt_file import PromptFile, PromptWriter
from moe_rl.types import Prompt
from tests.support.task import task_of

ROWS = [
    {"prompt": f"{n}+1=", "answer": str(n + 1), "other": value}
    for n, value in enumerate([None, 2**70, 1.5, "ä\n", [{"a": [1, None]}], {"b": "\U0001f600"}, True])
]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(prompt_file, "SMALLEST_BYTES", 0)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(data, *more):
    source = f"task.train=[{{name: one, data: {data}, drop: [too_long]}}]"
    heldout = data.with_name("heldout.jsonl")
    if not heldout.exists():
        write(heldout, ROWS)
    small = [f"task.heldout=[{{name: two, data: {heldout}}}]", "eval.prompts=4", "rollout.prompts_per_step=4"]
    return task_of(load_config("configs/tiny_moe_cpu.yaml", [source, *small, *more])).train[0]


def kept(data):
    return data.with_name(f"{data.name}.one.prompts")


@pytest.mark.parametrize(("rows", "more"), [(ROWS, ()), (CHAT, ("model.path=assets/tiny_tool/policy",))])
def test_the_second_start_gets_the_same_prompts_without_reading(tmp_path, monkeypatch, rows, more):
    data = write(tmp_path / "rows.jsonl", rows)
    first = load(data, *more)
    with monkeypatch.context() as context:
        context.setattr("moe_rl.tasks.prompts.read_rows", None)
        second = load(data, *more)
    monkeypatch.setattr(prompt_file, "SMALLEST_BYTES", 1 << 40)
    plain = load(data, *more)
    assert list(first.prompts) == list(second.prompts) == list(plain.prompts) and len(second.prompts) == len(rows)
    assert second.prompts[-1] == plain.prompts[-1] and second.prompts[2:4] == plain.prompts[2:4]
    assert first.notes == second.notes == (*plain.notes, f"kept for the next start in {data}.one.prompts")


def test_what_the_prompts_depend_on_makes_them_anew(tmp_path, monkeypatch):
    data = write(tmp_path / "rows.jsonl", ROWS)
    load(data)
    before = kept(data).read_bytes()
    for more in ("rollout.max_prompt_tokens=5", "model.path=assets/tiny_tool/policy"):
        load(data, more)
        assert kept(data).read_bytes() != before
    write(data, [{**ROWS[0], "prompt": "9+9="}, *ROWS[1:]])
    assert load(data).prompts[0].text == "9+9="


@pytest.mark.parametrize("place", [0, 40, -60, -20, -1])
def test_a_damaged_file_is_made_anew(tmp_path, place):
    data = write(tmp_path / "rows.jsonl", ROWS)
    first, whole = list(load(data).prompts), kept(data).read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    for content in (damaged, whole[:-9], b""):
        kept(data).write_bytes(content)
        assert list(load(data).prompts) == first and kept(data).read_bytes() == whole


def test_nothing_is_kept_of_rows_that_are_refused(tmp_path):
    data = write(tmp_path / "rows.jsonl", [*ROWS, {"answer": "1"}])
    with pytest.raises(DataError, match="lacks the column prompt"):
        load(data)
    assert [file.name for file in tmp_path.glob("rows*")] == ["rows.jsonl"]


@pytest.mark.parametrize("block", [1 << 20, 200])
def test_a_folder_without_room_is_said_and_the_rows_are_read(tmp_path, monkeypatch, block):
    """The room ends at the end of the file, or before it, with bytes that are still in the buffer."""
    monkeypatch.setattr(prompt_file, "_BLOCK", block)
    data = write(tmp_path / "rows.jsonl", ROWS)

    monkeypatch.setattr(prompt_file.secrets, "token_hex", lambda count: "name")
    data.with_name(f"{data.name}.one.prompts.name.tmp").symlink_to("/dev/full")
    read = load(data)
    assert len(read.prompts) == len(ROWS) and "No space left" in read.notes[-1] and "at each start" in read.notes[-1]
    assert [file.name for file in tmp_path.glob("rows*")] == ["rows.jsonl"]


def test_processes_with_the_same_pid_keep_the_same_prompts_at_once(tmp_path):
    """Two containers with one file system may give their processes the same pid."""
    kept, prompt = PromptFile(tmp_path / "rows.prompts", "digest"), Prompt("one/0", "1+1=", (5, 6))
    with closing(PromptWriter(kept)) as first, closing(PromptWriter(kept)) as second:
        for writer in (first, second):
            writer.append(prompt)
        assert list(first.finish({})) == list(second.finish({})) == [prompt]
    assert [file.name for file in tmp_path.iterdir()] == ["rows.prompts"]


@pytest.mark.parametrize("gone", [True, False])
def test_a_file_that_is_damaged_as_soon_as_it_is_kept_is_said_and_the_rows_are_read(tmp_path, monkeypatch, gone):
    data, replace = write(tmp_path / "rows.jsonl", ROWS), Path.replace

    def harmed(path, target):
        replace(path, target)
        target.unlink()
        if not gone:
            target.write_bytes(b"short")

    monkeypatch.setattr(Path, "replace", harmed)
    read = load(data)
    assert [prompt.text for prompt in read.prompts] == [row["prompt"] for row in ROWS]
    assert "at each start" in read.notes[-1] and str(kept(data)) in read.notes[-1]
