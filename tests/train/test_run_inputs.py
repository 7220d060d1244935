"""What a run reads is compared by its content when the run is resumed or replayed, and what changed is named."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moe_rl.config.load import load_config
from moe_rl.errors import ConfigError
from moe_rl.tasks.code_files import code_of
from moe_rl.tasks.prompts import PromptSet
from moe_rl.train import run_folder, run_inputs
from moe_rl.train.run_inputs import changed_inputs, input_problems, read_inputs, write_inputs
from moe_rl.types import Prompt
from tests.support.refusals import refused
from tests.support.task import task_of

ROWS = [{"id": f"r{n}", "prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(6)]


class Run:
    """A run whose model, prompts and reward function are in a folder of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copytree("assets/tiny_moe/policy", folder / "model")
        self.write("train", ROWS)
        self.write("heldout", ROWS[:2])
        (folder / "code" / "parts").mkdir(parents=True)
        (folder / "code/rewarding.py").write_text(
            "def value(completion):\n    from parts import deep\n    return 1.0\n"
        )
        (folder / "code/parts/__init__.py").write_text("")
        (folder / "code/parts/deep.py").write_text("from . import deeper\nimport xxhash\nimport json\n")
        (folder / "code/parts/deeper.py").write_text("SCALE = 1\n")
        (folder / "code/unused.py").write_text("SCALE = 1\n")
        self.config = load_config(
            "configs/tiny_moe_cpu.yaml",
            [
                f"model.path={folder}/model",
                f"run.runs_dir={folder}/runs",
                f"task.train=[{{name: sums, data: {folder}/train.jsonl, id: id}}]",
                f"task.heldout=[{{name: sums, data: {folder}/heldout.jsonl, id: id}}]",
                "task.rewards={v: {function: rewarding.value}}",
                "rollout.prompts_per_step=2",
                "eval.prompts=1",
                "task.pass_reward=v",
            ],
        )
        self.run = run_folder.create(self.config)
        write_inputs(self.run, self.inputs())

    def write(self, name, rows):
        (self.folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def inputs(self, *overrides):
        config = load_config(self.run.config, overrides) if overrides else self.config
        return read_inputs(config, task_of(config))

    def changed(self, *overrides):
        return set(changed_inputs(self.run, load_config(self.run.config, overrides), self.inputs(*overrides)))

    def problems(self, *accepted, overrides=()):
        return input_problems(self.run, load_config(self.run.config, overrides), self.inputs(*overrides), accepted)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    return Run(tmp_path)


def test_what_the_run_wrote_down_is_read_once(begun, monkeypatch):
    read, real = [], run_inputs.read_lines
    monkeypatch.setattr(run_inputs, "read_lines", lambda file, kind: read.append(file) or real(file, kind))
    assert begun.problems() == [] and len(read) == 1


def test_the_inputs_are_named(begun):
    names = {one.name for one in begun.inputs()}
    assert {"model/config.json", "model/model.safetensors", "model/tokenizer.json", "model/generation_config.json"} <= (
        names
    )
    code = {f"reward/v/{module}" for module in ("rewarding", "parts", "parts.deep", "parts.deeper")}
    assert names - {name for name in names if name.startswith("model/")} == {
        "train/sums", "heldout/sums", *code, "package/xxhash",
    }  # fmt: skip
    assert not {"rewarding", "parts"} & sys.modules.keys(), "no code of the user runs"


def other_byte(file, at):
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


CHANGES = {  # what is done to the folder, and what is told of it
    "weights": (lambda f: other_byte(f / "model/model.safetensors", -3), "model/model.safetensors: "),
    "config": (lambda f: (f / "model/config.json").write_text((f / "model/config.json").read_text() + "\n"),
               "model/config.json: "),
    "template": (lambda f: (f / "model/chat_template.jinja").write_text("{{ messages }}"),
                 "model/chat_template.jinja: new"),
    "tokenizer's code": (lambda f: (f / "model/tokenization_own.py").write_text("x = 1"), "tokenization_own.py: new"),
    "generation": (lambda f: (f / "model/generation_config.json").unlink(), "model/generation_config.json: gone"),
    "reward": (lambda f: (f / "code/rewarding.py").write_text("import parts.deep\n\n\ndef value():\n    return 2.0\n"),
               "reward/v/rewarding: "),
    "a helper's helper": (lambda f: (f / "code/parts/deeper.py").write_text("SCALE = 2\n"), "reward/v/parts.deeper: "),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file_is_named(begun, change):
    do, told = CHANGES[change]
    do(begun.folder)
    (wrong,) = begun.problems()
    assert told in str(wrong) and wrong.fault == "inputs" and "--accept" in str(wrong)
    group = told.partition("/")[0] if "/" in told else "model"
    assert begun.problems(group) == [] and begun.problems(*begun.changed()) == []
    assert len(begun.problems("train/sums")) == 1


def changed_row(**columns):
    return [*ROWS[:3], ROWS[3] | columns, *ROWS[4:]]


ROW_CHANGES = {
    "an answer": (changed_row(answer="7"), "1 rows changed (sums/r3)"),
    "a prompt": (changed_row(prompt="9+1="), "1 rows changed (sums/r3)"),
    "a column that nobody names": (changed_row(note="x"), "1 rows changed (sums/r3)"),
    "another order": ([*ROWS[:2], *ROWS[:1:-1]], "the same rows in another order, from sums/r2 on"),
    "fewer": (ROWS[:4], "2 rows gone (sums/r4, sums/r5)"),
    "more": ([*ROWS, {"id": "r9", "prompt": "1", "answer": "1"}], "1 rows more (sums/r9)"),
    "other ids": ([row | {"id": f"x{row['id']}"} for row in ROWS], "6 rows gone"),
}


@pytest.mark.parametrize("change", ROW_CHANGES)
def test_a_changed_row_is_named(begun, change):
    rows, told = ROW_CHANGES[change]
    begun.write("train", rows)
    (wrong,) = begun.problems()
    assert f"train/sums: {told}" in str(wrong) and begun.changed() == {"train/sums"}
    assert begun.problems("train/sums") == begun.problems("train") == []


def test_rows_that_move_up_because_one_that_was_left_out_is_gone_have_other_ids(begun):
    """Without a column of ids, the number of a row in its file is its id."""
    by_number = [f"task.train=[{{name: sums, data: {begun.folder}/train.jsonl, drop: [empty]}}]"]
    begun.write("train", [{"prompt": "", "answer": "0"}, *ROWS])
    write_inputs(begun.run, begun.inputs(*by_number))
    assert begun.problems(overrides=by_number) == []
    begun.write("train", ROWS)
    (wrong,) = begun.problems(overrides=by_number)
    assert "train/sums: the same rows under other ids" in str(wrong)


def test_a_tokenizer_that_changed_is_seen_in_files_and_rows(begun):
    file = begun.folder / "model/tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(tokenizer))
    assert begun.changed() == {"model/tokenizer.json"}
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "1"}, "content": "2"}
    file.write_text(json.dumps(tokenizer))
    assert begun.changed() == {"model/tokenizer.json", "train/sums", "heldout/sums"}


def test_what_is_no_change(begun):
    """Another folder with the same content, other times, files that nothing reads, other modules."""
    shutil.copytree(begun.folder / "model", begun.folder / "elsewhere")
    (begun.folder / "elsewhere/model.safetensors").touch()
    (begun.folder / "model/README.md").write_text("read me")
    (begun.folder / "code/unused.py").write_text("SCALE = 3\n")
    (begun.folder / "train.jsonl").write_text((begun.folder / "train.jsonl").read_text() + "\n")
    assert begun.problems() == [] and begun.problems(overrides=["run.steps=99", "train.optimizer.lr=1e-5"]) == []
    moved = [f"model.path={begun.folder}/elsewhere"]
    assert begun.problems(overrides=moved) == []
    run_folder.reopen(begun.run.path, moved)  # and the config may say so
    other_byte(begun.folder / "elsewhere/model.safetensors", -1)
    assert len(begun.problems(overrides=moved)) == 1


def test_held_out_prompts_may_change_with_the_config_alone(begun):
    begun.write("heldout", ROWS[1:3])
    (wrong,) = begun.problems()
    assert "heldout/sums: 1 rows gone (sums/r0); 1 rows more (sums/r2)" in str(wrong)
    assert begun.problems("heldout") == []
    begun.write("other", ROWS)
    others = [f"task.heldout=[{{name: other, data: {begun.folder}/other.jsonl, id: id}}]"]
    assert begun.problems(overrides=others) == []


def test_a_replay_needs_the_model_and_the_prompts(begun):
    config = load_config(begun.run.config, [f"run.replays={begun.run.path}"])
    (begun.folder / "code/rewarding.py").write_text("def value(completion):\n    return 3.0\n")
    begun.write("heldout", ROWS[3:])
    assert input_problems(None, config, begun.inputs(), []) == []
    assert input_problems(None, begun.config, begun.inputs(), []) == [], "a new run has nothing to compare with"
    begun.write("train", changed_row(answer="0"))
    other_byte(begun.folder / "model/model.safetensors", -1)
    (wrong,) = input_problems(None, config, begun.inputs(), [])
    assert "model/model.safetensors" in str(wrong) and "sums/r3" in str(wrong)


def test_a_name_that_is_no_input_is_refused(begun):
    (wrong,) = begun.problems("train/sum")
    assert wrong.about == {"option": "--accept"} and "Did you mean train/sums?" in str(wrong)


def test_a_folder_without_the_inputs_is_refused(begun):
    (begun.run.path / run_inputs.FILE).unlink()
    (wrong,) = begun.problems()
    assert wrong.fault == "absent"
    with refused(ConfigError, fault="absent"):
        begun.changed()


@pytest.mark.parametrize("at", [0, 70 << 20, -1])
def test_a_large_file_is_sampled(tmp_path, at):
    """A block of each MiB, and the last one. A file that is cut or grows is another one too."""
    large = tmp_path / "large.safetensors"
    with large.open("wb") as file:
        file.truncate((80 << 20) + 5)
    before = run_inputs._of_file(large)
    with large.open("r+b") as file:
        file.seek(at, 2 if at < 0 else 0)
        file.write(b"\1")
    assert run_inputs._of_file(large) != before
    with large.open("r+b") as file:
        file.truncate((80 << 20) + 6)
    assert run_inputs._of_file(large) != before


def test_generated_prompts_and_the_versions_of_their_library_are_inputs(begun, monkeypatch):
    """What another seed, other options or another version of the library gives is seen in the first items."""

    def of(text, version):
        items = [Prompt(f"g/{n}", f"{text}{n}", (n,), {"answer": n}) for n in range(3)]
        task = replace(task_of(begun.config), train=(PromptSet("g", items, make=lambda n: items[n]),))
        monkeypatch.setattr(run_inputs.importlib.metadata, "version", lambda name: version)
        rewards = load_config("configs/reasoning_gym_cpu.yaml", []).task.rewards
        config = begun.config.model_copy(update={"task": begun.config.task.model_copy(update={"rewards": rewards})})
        return {one.name: one for one in read_inputs(config, task)}

    before, after = of("a", "0.1.24"), of("b", "0.1.25")
    assert before["train/g"].rows.keys() == {"g/0", "g/1", "g/2"} and before["train/g"] != after["train/g"]
    assert (before["package/reasoning-gym"].digest, after["package/reasoning-gym"].digest) == ("0.1.24", "0.1.25")


def test_code_that_cannot_be_found_or_read_is_left_to_who_imports_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert code_of("no_such_module_here.value") == ({}, {})
    (tmp_path / "broken_here.py").write_text("def (")
    assert code_of("broken_here.value") == ({"broken_here": tmp_path / "broken_here.py"}, {})
    assert "moe_rl.tasks.rewards" in code_of("moe_rl.tasks.rewards.exact_match")[0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("rewarding", "import importlib\nhelper = importlib.import_module('helper')"),
        ("rewarding", "from importlib import import_module\nhelper = import_module('helper', None)"),
        ("rewarding", "helper = __import__('helper')"),
        ("own.rewarding", "import importlib\nhelper = importlib.import_module('.helper', __package__)"),
        ("own.rewarding", "import os, sys\nsys.path.append(os.path.dirname(__file__))\nimport helper"),
        ("own.rewarding", "import os, sys\nsys.path.append(os.path.dirname(__file__))\nfrom helper.deep import x"),
    ],
)
def test_a_module_that_is_imported_in_another_way_is_found(tmp_path, monkeypatch, module, text):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / f"{module.replace('.', '/')}.py"
    (file.parent / "helper").mkdir(parents=True)
    for one in (file, file.parent / "helper/__init__.py", file.parent / "helper/deep.py"):
        one.write_text(text if one == file else "x = 1")
    assert file.parent / "helper/__init__.py" in code_of(f"{module}.value")[0].values()


def test_a_line_is_written_as_it_is_read(begun):
    lines = (begun.run.path / run_inputs.FILE).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [asdict(one) for one in begun.inputs()]
