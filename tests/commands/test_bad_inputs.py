"""What a user can get wrong in a config and its files. Each is told as one problem before anything starts."""

import json
import os
import shutil
from pathlib import Path

import pytest

from moe_rl.commands import plan, start_checks, train
from moe_rl.config.check import refuse
from moe_rl.config.load import load_config
from moe_rl.errors import ConfigError, DataError
from moe_rl.train.run_folder import RunFolder
from tests.support.refusals import tells

ROOT = Path(__file__).parents[2]
GOOD = [{"id": f"{n}", "prompt": f"{n}+1=", "answer": f"{n + 1}", "level": "1"} for n in range(4)]

TRAIN, HELD = "task.train.0", "task.heldout.0"
GENERATOR = "task.train=[{name: g, data: 'reasoning_gym:%s', prompt: question, drop: [too_long], seed: 1%s}]"

OURS = [
    "rollout.prompts_per_step=4",
    "eval.prompts=4",
    "train.updates_per_step=1",
    "train.optimizer.warmup_steps=1",
    f"{TRAIN}.data=train.jsonl",
    f"{HELD}.data=heldout.jsonl",
]

# What is wrong: rows put behind four good training prompts, or none; overrides; the key and the other facts told.
BAD = {
    "no JSON": (["{"], [], TRAIN, {"line": 5}),
    "no object": (["[1]"], [], TRAIN, {"line": 5, "got": "list"}),
    "a key twice": (['{"id": "a", "id": "b", "prompt": "1"}'], [], TRAIN, {"line": 5}),
    "a surrogate": ([GOOD[0] | {"id": "a", "prompt": "\ud800"}], [], TRAIN, {"line": 5}),
    "a duplicate id": ([GOOD[2]], [], TRAIN, {"line": 5, "got": ("'2'", "line 3"), "fault": "duplicate"}),
    "three duplicate ids": ([GOOD[2]] * 3, [], TRAIN, {"line": 5, "fault": "duplicate"}),
    "an empty prompt": ([GOOD[0] | {"id": "a", "prompt": ""}], [], TRAIN, {"line": 5, "fault": "empty"}),
    "a long prompt": ([GOOD[0] | {"id": "a", "prompt": "1+" * 99}], [], TRAIN, {"line": 5, "fault": "too_long"}),
    "a prompt of a number": ([GOOD[0] | {"id": "a", "prompt": 7}], [], TRAIN, {"line": 5, "got": "int"}),
    "no prompt": ([{"id": "a", "level": "1", "answer": "1"}], [], TRAIN, {"line": 5, "fault": "missing"}),
    "no id": ([{"prompt": "1", "level": "1", "answer": "1"}], [], TRAIN, {"line": 5, "fault": "missing"}),
    "no level": ([{"prompt": "1", "id": "a", "answer": "1"}], [], TRAIN, {"line": 5, "fault": "missing"}),
    "an id that is a list": ([GOOD[0] | {"id": []}], [], TRAIN, {"line": 5, "got": "list"}),
    "messages without a template": ([GOOD[0] | {"id": "a", "prompt": [{}]}], [], "task.chat", {"fault": "no template"}),
    "no answer": (
        [{"id": "a", "prompt": "1", "level": "1"}],
        [],
        "task.rewards.exact_match",
        {"argument": "answer", "got": ("sums/a",)},
    ),
    "a column with another name": ([], [f"{TRAIN}.prompt=question"], TRAIN, {"line": 1, "fault": "missing"}),
    "no such file": ([], [f"{TRAIN}.data=absent.jsonl"], f"{TRAIN}.data", {"file": "absent.jsonl"}),
    "no such folder": ([], [f"{TRAIN}.data=/no/such/folder"], f"{TRAIN}.data", {"file": "/no/such/folder"}),
    "a damaged table": ([], [f"{TRAIN}.data=damaged.parquet"], TRAIN, {"fault": "unreadable"}),
    "training on held-out prompts": ([], [f"{HELD}.data=train.jsonl"], HELD, {"got": "train.jsonl"}),
    "an empty file": ([], [f"{HELD}.data=empty.jsonl"], HELD, {"file": "empty.jsonl"}),
    "everything dropped": ([], [f"{HELD}.data=blank.jsonl", f"{HELD}.drop=[empty]"], HELD, {"fault": "empty"}),
    "too few left": ([GOOD[0]], [f"{TRAIN}.drop=[duplicate]", "rollout.prompts_per_step=5"], "rollout.prompts_per_step",
                     {"got": 5, "expected": "at most 4"}),
    "too few prompts": ([], ["rollout.prompts_per_step=6"], "rollout.prompts_per_step", {"expected": "at most 4"}),
    "too few held-out prompts": ([], ["eval.prompts=9"], "eval.prompts", {"expected": "at most 4"}),
    "too few prompts in a set": ([], [f"{HELD}.prompts=9"], f"{HELD}.prompts", {"got": 9, "expected": "at most 4"}),
    "pass@k of more samples": ([], [f"{HELD}.samples=4", f"{HELD}.pass_at=[1, 8]"], f"{HELD}.pass_at", {"got": "8"}),
    "pass@k twice": ([], [f"{HELD}.samples=4", f"{HELD}.pass_at=[2, 2]"], f"{HELD}.pass_at", {"got": "2"}),
    "several greedy samples": ([], [f"{HELD}.samples=2", f"{HELD}.temperature=0"], f"{HELD}.samples", {"got": "2"}),
    "a greedy choice": ([], [f"{HELD}.top_p=0.9", f"{HELD}.temperature=0"], f"{HELD}.top_p", {"got": "0.9"}),
    "a temperature that vLLM raises": ([], [f"{HELD}.temperature=0.001"], f"{HELD}.temperature", {"got": "0.001"}),
    "no such evaluation": ([], ["eval.best=eval/pass_rate_gredy"], "eval.best", {"got": "eval/pass_rate_gredy"}),
    "patience without a metric": ([], ["eval.patience=2"], "eval.patience", {"expected": "eval.best"}),
    "a gain without patience": ([], ["eval.best=eval/pass_rate", "eval.min_gain=0.1"], "eval.min_gain", {"got": 0.1}),
    "another number of prompts": ([], ["task.train_prompts=5"], "task.train_prompts", {"got": "4 prompts"}),
    "no source": ([], ["task.heldout=[]"], "task.heldout", {}),
    "a file name in the place of a list": ([], ["task.train=train.jsonl"], "task.train", {}),
    "a source without a name": ([], ["task.train=[{data: train.jsonl}]"], f"{TRAIN}.name", {}),
    "a misspelt key of a source": ([], [f"{TRAIN}.wieght=2"], f"{TRAIN}.wieght", {}),
    "no weight": ([], [f"{TRAIN}.weight=0"], f"{TRAIN}.weight", {"got": "0"}),
    "a weight of held-out prompts": ([], [f"{HELD}.weight=2"], f"{HELD}.weight", {}),
    "a place that a list lacks": ([], ["task.train.1.data=x.jsonl"], "task.train", {"got": "1"}),
    "two sources of one name": ([], ["task.train=[{name: a, data: train.jsonl}, {name: a, data: blank.jsonl}]"],
                                "task.train.1.name", {"got": "a"}),
    "a split of a file": ([], [f"{TRAIN}.split=train"], f"{TRAIN}.split", {"got": "train"}),
    "a fault that cannot be dropped": ([], [f"{TRAIN}.drop=[wrong]"], f"{TRAIN}.drop.0", {}),
    "a generator without a seed": ([], [GENERATOR % ("chain_sum", ""), f"{TRAIN}.seed=null"], f"{TRAIN}.seed", {}),
    "a generator of any length": ([], [GENERATOR % ("chain_sum", ""), f"{TRAIN}.drop=[empty]"], f"{TRAIN}.drop",
                                         {"got": "[empty]"}),
    "no such generator": ([], [GENERATOR % ("chain_sums", "")], f"{TRAIN}.data", {"got": "chain_sums"}),
    "a generator's unknown option": ([], [GENERATOR % ("chain_sum", ", options: {terms: 2}")], f"{TRAIN}.options", {}),
    "a generator that ends": ([], [GENERATOR % ("gsm_symbolic", "")], f"{TRAIN}.data", {}),
    "a generator's long prompts": ([], [GENERATOR % ("chain_sum", "")], TRAIN, {"row": 0, "fault": "redraws"}),
    "a template that is not there": ([], ["task.chat={}"], "task.chat", {"fault": "no template"}),
    "messages that are no JSON": ([GOOD[0] | {"id": "a", "prompt": "[{'role': 'user', 'content': '1'}]"}], [], TRAIN,
                                  {"line": 5, "got": ("role",)}),
    "tools that no template shows": ([GOOD[0] | {"id": "a", "tools": [{"name": "add"}]}], [], TRAIN,
                                     {"line": 5, "expected": ("task.chat", "tools=null")}),
    "an answer inside no column": ([], [f"{TRAIN}.answer=reward_model.ground_truth"], TRAIN,
                                   {"line": 1, "fault": "missing"}),
    "an answer that is no number": ([GOOD[0] | {"id": "a", "answer": "x"}],
                                    ["task.rewards={n: {kind: numeric}}", "task.pass_reward=n"],
                                    "task.max_failed_fraction", {"fault": "answers", "got": "1 of 9"}),
    "a chat that never ends": ([], ["model.path=endless", "task.chat={}"], "rollout.stop_token_ids",
                               {"fault": "endless", "got": "'<|end|>' (1)"}),
    "a reward that is not there": ([], ["task.rewards.format.function=moe_rl.tasks.rewards.answer_shape"],
                                   "task.rewards.format.function", {}),
    "a reward without a module": ([], ["task.rewards.format.function=no_such.module.f"],
                                  "task.rewards.format.function", {}),
    "a reward whose import fails": ([], ["task.rewards.format.function=broken.f"],
                                    "task.rewards.format.function", {}),
    "a reward that always fails": ([], ["task.rewards.format.function=failing.f", "task.max_failed_fraction=0.1"],
                                   "task.max_failed_fraction", {"fault": "too many"}),
    "a reward that is no function": ([], ["task.rewards.format.function=broken_kind.f"],
                                     "task.rewards.format.function", {}),
    "no such pass reward": ([], ["task.pass_reward=exakt"], "task.pass_reward", {"got": "exakt"}),
    "a stop token that no text has": ([], ["rollout.stop_token_ids=[1, 4000]"], "model.path", {"got": "4000"}),
    "an empty stop string": ([], ["rollout.stop=['##', '']"], "rollout.stop.1", {}),
    "a stop string behind another": ([], ["rollout.stop=['a##b', '##']"], "rollout.stop.0", {"got": "'a##b'"}),
    "the same stop string twice": ([], ["rollout.stop=['##', '##']"], "rollout.stop.1", {"got": "'##'"}),
    "no tokenizer": ([], ["model.path=bare"], "model.path", {"folder": "bare"}),
    "a damaged tokenizer": ([], ["model.path=damaged"], "model.path", {}),
    "a tokenizer with code of its own": ([], ["model.path=coded"], "model.path", {"fault": "tokenizer code"}),
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the demo's policy and four prompts each."""
    monkeypatch.chdir(tmp_path)
    policy = ROOT / "assets/tiny_moe/policy"
    (tmp_path / "assets/tiny_moe").mkdir(parents=True)
    (tmp_path / "assets/tiny_moe/policy").symlink_to(policy)
    for name in ("bare", "damaged", "coded"):
        without = shutil.ignore_patterns("tokenizer*")
        shutil.copytree(policy, tmp_path / name, ignore=without, copy_function=os.symlink)
    (tmp_path / "damaged/tokenizer.json").write_text("{}")
    (tmp_path / "coded/tiktoken.model").write_text("")
    (tmp_path / "coded/tokenizer_config.json").write_text('{"auto_map": {}}')
    shutil.copytree(ROOT / "assets/tiny_gym/policy", tmp_path / "endless")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((tmp_path / "endless" / name).read_text()) | {"eos_token_id": 0}
        (tmp_path / "endless" / name).write_text(json.dumps(settings))
    lines(tmp_path / "heldout.jsonl", GOOD)
    lines(tmp_path / "blank.jsonl", [row | {"prompt": ""} for row in GOOD])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.py").write_text("def f(completion): ...\nraise RuntimeError('not today')\n")
    (tmp_path / "failing.py").write_text("def f(completion):\n    raise ValueError('never')\n")
    (tmp_path / "broken_kind.py").write_text("f = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "damaged.parquet").write_text("PAR1")
    return tmp_path


def lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def told(*overrides):
    """Return the problems that a start would find; the run starts only when there is none."""
    try:
        config = load_config(ROOT / "configs/tiny_moe_cpu.yaml", [*OURS, *overrides])
        refuse(start_checks.every_problem(config, None, 2, first=True)[0])
    except (ConfigError, DataError) as error:
        return [problem for problem in error.problems if problem.about]
    return []


def test_the_good_input_has_no_problem(here):
    lines(here / "train.jsonl", [*GOOD, ""])
    assert told() == []


def test_a_right_answer_that_cannot_be_read_is_a_note(here):
    lines(here / "train.jsonl", [*GOOD, GOOD[0] | {"id": "a", "answer": "x"}])
    config = load_config(ROOT / "configs/tiny_moe_cpu.yaml", [*OURS, "task.rewards={n: {kind: numeric}}",
                         "task.pass_reward=n", "task.max_failed_fraction=0.2"])  # fmt: skip
    found, task = start_checks.every_problem(config, None, 2, first=True)
    assert found == [] and "1 of 9" in task.notes()[-1] and "sums/a: n: " in task.notes()[-1]


@pytest.mark.parametrize("name", BAD)
def test_each_mistake_is_one_problem_before_anything_starts(here, name):
    rows, overrides, key, facts = BAD[name]
    if "reasoning_gym:" in str(overrides) and name not in ("a generator without a seed", "a generator of any length"):
        pytest.importorskip("reasoning_gym")
    lines(here / "train.jsonl", [*GOOD, *rows])
    (problem,) = told(*overrides)
    tells(problem, key=key, **facts)
    assert not (here / "runs").exists()


def test_a_resumed_run_needs_the_folder_where_it_is_now(here):
    lines(here / "train.jsonl", GOOD)
    (here / "runs").symlink_to(here / "gone")
    (here / "moved").mkdir()
    config = load_config(ROOT / "configs/tiny_moe_cpu.yaml", [*OURS, f"run.runs_dir={here / 'runs'}"])
    assert start_checks.every_problem(config, RunFolder(here / "moved"), 2, first=False)[0] == []
    (problem,) = start_checks.every_problem(config, None, 2, first=False)[0]
    tells(problem, key="run.runs_dir", got=str(here / "runs"))


def test_the_table_has_forty_inputs():
    assert len(BAD) >= 40 and plan.run is train.run
