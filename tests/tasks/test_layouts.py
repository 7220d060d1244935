"""Rows as published data sets and other frameworks lay them out: where the prompt, the tools and the answer are."""

import json
from pathlib import Path

import pytest

from moe_rl.config.load import load_config
from moe_rl.config.prompt_sources import ChatConfig
from moe_rl.config.reward_kinds import ExactReward, MathVerifyReward, NumericReward, RemoteReward
from moe_rl.errors import ConfigError, DataError, RewardError
from moe_rl.tasks.chat_columns import refuse_unread
from moe_rl.tasks.prompts import load_task
from moe_rl.tasks.tokenizer import ChatTemplate, TextCodec
from tests.support.refusals import refused, tells

ASSETS = Path(__file__).parents[2] / "assets"
CHAT = [{"role": "user", "content": "What is 1+1?"}]
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
}
BARE = {"name": "add", "description": "Adds.", "parameters": {"a": {"type": "int"}}}


@pytest.fixture
def load(tmp_path):
    def load(rows, model="tiny_moe", limit=600, task=None, **source):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "held.jsonl").write_text('{"prompt": "1", "answer": "2"}\n')
        config = {
            "run": {"name": "layouts", "steps": 1},
            "model": {"path": str(ASSETS / model / "policy")},
            "task": {
                "train": [{"name": "rows", "data": str(tmp_path / "rows.jsonl"), **source}],
                "heldout": [{"name": "held", "data": str(tmp_path / "held.jsonl")}],
                "rewards": {"exact": {"kind": "exact"}},
                "pass_reward": "exact",
                **(task or {}),
            },
            "rollout": {
                "prompts_per_step": 1,
                "group_size": 2,
                "max_prompt_tokens": limit,
                "max_completion_tokens": 6,
            },
            "train": {"microbatch_tokens": 2048, "optimizer": {"lr": 1e-6}},
            "eval": {"prompts": 1},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        config = load_config(tmp_path / "config.yaml")
        return load_task(config, TextCodec(config.model.path, ()))

    return load


LAYOUTS = {
    "verl": (
        {
            "data_source": "gsm8k",
            "prompt": CHAT,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "extra_info": {"split": "train", "index": 7},
        },
        {"answer": "reward_model.ground_truth", "id": "extra_info.index"},
    ),
    "verl, objects as JSON text": (
        {"prompt": json.dumps(CHAT), "reward_model": '{"style": "rule", "ground_truth": "2"}'},
        {"answer": "reward_model.ground_truth"},
    ),
    "several right answers": (
        {"prompt": CHAT, "reward_model": {"ground_truth": '["2", "2.0"]'}},
        {"answer": "reward_model.ground_truth.0"},
    ),
    "SkyRL": (
        {
            "data_source": "x",
            "prompt": CHAT,
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": "2"},
        },
        {"answer": "reward_spec.ground_truth"},
    ),
    "ROLL": (
        {"id": "0", "prompt": "What is 1+1?", "messages": json.dumps(CHAT), "ground_truth": "2", "tag": "math"},
        {"prompt": "messages", "answer": "ground_truth", "id": "id", "level": "tag"},
    ),
    "open-instruct": (
        {"messages": CHAT, "ground_truth": ["2"], "dataset": ["math"]},
        {"prompt": "messages", "answer": "ground_truth.0", "level": "dataset.0"},
    ),
    "OpenRLHF": (
        {"datasource": "x", "context_messages": CHAT, "label": "2"},
        {"prompt": "context_messages", "answer": "label"},
    ),
    "slime": ({"prompt": CHAT, "label": "2", "metadata": {"level": 3}}, {"answer": "label", "level": "metadata.level"}),
    "TRL": ({"prompt": CHAT, "solution": "2", "completion": "unused"}, {"answer": "solution"}),
    "NuminaMath": (
        {"source": "olympiads", "problem": "What is 1+1?", "solution": "2", "messages": CHAT},
        {"prompt": "messages", "answer": "solution", "level": "source"},
    ),
    "supervised": ({"prompt": CHAT, "completion": "2"}, {"answer": "completion"}),
    "verifiers": ({"prompt": CHAT, "answer": "2", "info": {}, "task": "default"}, {}),
    "a column with a dot in its name": ({"prompt": CHAT, "a.b": "2", "a": {"b": "3"}}, {"answer": "a.b"}),
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_reach_rewards_of_a_kind_and_functions(load, make_pool, layout):
    row, keys = LAYOUTS[layout]
    task = load([row], model="tiny_tool", **keys)
    [prompt] = task.train[0].prompts
    assert prompt.columns["answer"] == "2" and "What is 1+1?" in prompt.text and prompt.text != "What is 1+1?"
    assert [dict(one) for one in prompt.messages] == CHAT
    remote = RemoteReward(kind="remote", url="http://127.0.0.1:9/", arguments=("prompt", "messages", "answer"))
    kinds = {"exact": ExactReward(kind="exact"), "math": MathVerifyReward(kind="math_verify"), "remote": remote}
    with make_pool(kinds=kinds) as pool:
        sources = {name: found for name, found in task.columns().items() if "rows" in name}
        if layout == "ROLL":  # its column `prompt` is another text than the prompt
            with refused(ConfigError, key="task.rewards.remote", argument="prompt", fault="two meanings"):
                pool.check_arguments(sources)
        else:
            pool.check_arguments(sources)


def test_the_key_answer_names_the_column(load):
    rows = [{"prompt": "a", "truth": {"x": ["1", "2"]}, "answer": "a long text"}, {"prompt": "b", "truth": {"x": []}}]
    [one] = load(rows[:1], answer="truth.x.1").train[0].prompts
    assert one.columns == rows[0] | {"answer": "2"}
    with refused(DataError, "truth.x.1", fault="missing", line=2):
        load(rows, answer="truth.x.1")
    task = load(rows, answer="truth.x.1", drop=["missing"])
    assert len(task.train[0].prompts) == 1 and task.train[0].notes == ("left out 1 missing",)


def test_what_to_do_about_an_answer_that_no_column_has(load, make_pool):
    task = load([{"prompt": "a", "reward_model": {"ground_truth": "1"}}])
    remote = RemoteReward(kind="remote", url="http://127.0.0.1:9/", arguments=("answer",))
    kinds = {"exact": ExactReward(kind="exact"), "remote": remote}
    with make_pool("nosy_with_answer", kinds=kinds) as pool, pytest.raises(ConfigError) as caught:
        pool.check_arguments(task.columns())
    found = {str(problem.about["key"]): problem for problem in caught.value.problems}
    for name in ("nosy_with_answer", "exact", "remote"):
        problem = found[f"task.rewards.{name}"]
        tells(problem, "`answer`", "source rows of task.train", argument="answer", fault="no column")
        assert ("default" in problem) == (name == "nosy_with_answer")
        assert ("`arguments`" in problem) == (name == "remote")


def test_a_column_that_was_left_out_is_named(load, make_pool, tmp_path):
    (tmp_path / "nan.jsonl").write_text('{"prompt": "a", "answer": NaN}\n')
    task = load([], data=str(tmp_path / "nan.jsonl"))
    told = refused(ConfigError, argument="answer", got=("left out", "answer"))
    with make_pool(kinds={"exact": ExactReward(kind="exact")}) as pool, told:
        pool.check_arguments(task.columns())


@pytest.mark.long
@pytest.mark.parametrize("chat", [{}, {"chat": {}}])
def test_messages_and_tools_as_json_text_are_messages_and_tools(load, chat):
    def text(rows, **keys):
        return [one.text for one in load(rows, model="tiny_tool", task=chat, **keys).train[0].prompts]

    [plain] = text([{"prompt": CHAT, "tools": [ADD]}])
    assert '{"name": "add", "parameters"' in plain and plain.endswith("<|im_start|>assistant\n")
    stored = [
        {"prompt": json.dumps(CHAT, indent=1), "tools": json.dumps([ADD])},
        {"prompt": json.dumps(json.dumps(CHAT)), "tools": [ADD]},
        {"prompt": CHAT, "tools": [json.dumps(ADD)]},
        {"prompt": json.dumps([{"name": None, **CHAT[0]}]), "tools": [ADD]},
    ]
    assert text(stored) == [plain] * 4
    assert text([{"m": {"messages": CHAT, "functions": [ADD]}}], prompt="m.messages", tools="m.functions") == [plain]
    assert text([{"m": json.dumps({"messages": CHAT, "t": [ADD]})}], prompt="m.messages", tools="m.t") == [plain]
    [xlam] = text([{"prompt": CHAT, "tools": json.dumps([BARE])}])
    assert json.dumps(BARE) in xlam
    [without] = text([{"prompt": CHAT, "tools": [ADD]}], tools=None)
    assert "add" not in without and text([{"prompt": CHAT, "tools": []}, {"prompt": CHAT}]) == [without, without]


@pytest.mark.long
def test_tools_of_a_row_count_as_tokens_of_its_prompt(load):
    rows = [{"prompt": CHAT, "tools": [ADD]}]
    [prompt] = load(rows, model="tiny_tool").train[0].prompts
    longest = len(prompt.token_ids)
    assert load(rows, model="tiny_tool", limit=longest)
    with refused(DataError, fault="too_long", got=f"{longest} tokens"):
        load(rows, model="tiny_tool", limit=longest - 1)


@pytest.mark.long
def test_tools_that_no_prompt_would_show(load):
    rows = [{"prompt": CHAT, "tools": [ADD]}]
    with refused(DataError, "task.chat.tools", line=1):
        load(rows, model="tiny_tool", task={"chat": {"tools": [ADD]}})
    with refused(DataError, "tools=null", line=1):
        load(rows, model="tiny_gym")


PRINTED = "[{'role': 'user', 'content': 'hi'}]"


@pytest.mark.parametrize(
    ("row", "keys", "pieces"),
    [
        ({"prompt": PRINTED}, {}, ["not JSON"]),
        ({"prompt": '[{"role": "user", "content": "hi"}'}, {}, ["not JSON"]),
        ({"prompt": '{"messages": [{"role": "user", "content": "hi"}]}'}, {}, ["prompt.messages"]),
        ({"prompt": '{"role": "user", "content": "hi"}'}, {}, ["list of messages"]),
        ({"prompt": '{"conversations": [{"from": "human", "value": "hi"}]}'}, {}, ["prompt.conversations"]),
        ({"prompt": '{"id": 3, "chat": [{"role": "user", "content": "hi"}]}'}, {}, ["prompt.chat"]),
        ({"prompt": {"messages": CHAT}}, {}, ["dict"]),
        ({"prompt": "1+1", "tools": [ADD]}, {}, ["task.chat", "tools=null"]),
        ({"prompt": "1+1", "tools": "hammer"}, {}, ["tools=null"]),
        ({"prompt": "1+1", "tools": [{"type": "function"}]}, {}, ["tools=null"]),
        ({"prompt": "1+1", "tools": '{"name": "f"}'}, {}, ["tools=null"]),
        ({"prompt": CHAT, "functions": [BARE]}, {}, ["tools=functions", "tools=null"]),
        ({"prompt": CHAT, "given": [ADD], "tools": []}, {}, ["tools=given"]),
        ({"prompt": CHAT, "chat_template_kwargs": {"enable_thinking": False}}, {}, ["task.chat.template_kwargs"]),
        ({"prompt": CHAT, "functions": json.dumps([BARE])}, {}, ["tools=functions"]),
        ({"prompt": CHAT, "metadata": {"tools": [ADD]}}, {}, ["tools=metadata.tools"]),
        ({"prompt": CHAT, "system": "Be brief."}, {}, ["column system "]),
        ({"prompt": CHAT, "system_prompt": "Be brief."}, {}, ["column system_prompt"]),
        ({"prompt": CHAT, "images": ["a.png"]}, {}, ["column images"]),
        ({"prompt": CHAT, "history": [["Hi.", "Hello."]]}, {}, ["column history"]),
        ({"instruction": CHAT, "input": "1, 2"}, {"prompt": "instruction"}, ["column input"]),
        ({"instruction": "Add.", "input": "1, 2"}, {"prompt": "instruction"}, ["column input"]),
        ({"prompt": CHAT, "image": "a.png"}, {}, ["column image "]),
        ({"prompt": "1+1", "images": json.dumps(["a.png"])}, {}, ["column images"]),
        ({"prompt": CHAT, "history": json.dumps([["Hi.", "Hello."]])}, {}, ["column history"]),
        ({"prompt": CHAT, "systemPrompt": ["Be brief."]}, {}, ["column systemPrompt"]),
        ({"r": {"input": CHAT, "instructions": "Be brief."}}, {"prompt": "r.input"}, ["column r.instructions"]),
        ({"r": json.dumps({"m": CHAT, "system": "Be brief."})}, {"prompt": "r.m"}, ["column r.system"]),
        ({"prompt": CHAT, "chat_template_kwargs": '{"enable_thinking": false}'}, {}, ["task.chat.template_kwargs"]),
        ({"prompt": " \n"}, {}, ["empty"]),
        ({"prompt": "[]"}, {}, ["empty"]),
        ({"prompt": [{"role": "user", "content": " "}]}, {}, ["empty"]),
        ({"prompt": "1+1", "l": {"a": 1}}, {"level": "l"}, ["column l is not a level"]),
    ],
)
def test_a_layout_that_is_refused_with_its_remedy(load, row, keys, pieces):
    with refused(DataError, *pieces, key="task.train.0", line=1):
        load([row], **keys)


def test_columns_that_only_look_like_parts_of_a_prompt():
    row = {"system": "", "images": [], "history": ["a"], "input": "x", "info": {"tools": ["add"]}}
    refuse_unread({**row, "prompt": CHAT}, "prompt", CHAT, ChatConfig(), tools_unknown=True)
    said = [{"role": "system", "content": "s"}, *CHAT]
    refuse_unread({"system": "s"}, "prompt", said, ChatConfig(), tools_unknown=True)
    refuse_unread({"system": "s"}, "prompt", CHAT, ChatConfig(system="t"), tools_unknown=True)
    refuse_unread({"system": "s", "prompt": "s: 1+1"}, "prompt", "s: 1+1", ChatConfig(), tools_unknown=True)


def test_images_without_a_json_value_are_no_less_unread():
    with pytest.raises(ValueError, match="column images"):
        refuse_unread({"prompt": CHAT}, "prompt", CHAT, ChatConfig(), tools_unknown=True, left_out={"dates", "images"})


@pytest.fixture(scope="module")
def template():
    return ChatTemplate(ASSETS / "tiny_tool/policy", None)


def test_parts_of_text_are_a_text(template):
    """A template that knows no parts would print them as a list of Python."""
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1+1?"}]
    assert template.messages([{"role": "user", "content": parts}]) == template.messages(CHAT) == tuple(CHAT)
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    call, function = calls[0], calls[0]["function"]
    for stored in (json.dumps(calls), [json.dumps(call)], [call | {"function": {"name": "add"}}]):
        said = {"role": "assistant", "content": "", "tool_calls": stored}
        assert template.messages([*CHAT, said, *CHAT])[1]["tool_calls"] == calls
    for stored in ([{"name": "add", "arguments": " "}], json.dumps([{"name": "add", "arguments": None}])):
        said = {"role": "assistant", "content": "", "tool_calls": stored}
        assert template.messages([*CHAT, said, *CHAT])[1]["tool_calls"] == [function]
    for stored in ("", "null", [], None):
        said = {"role": "assistant", "content": "x", "tool_calls": stored}
        assert template.messages([*CHAT, said, *CHAT])[1] == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "pieces"),
    [
        ([{"role": "human", "content": "hi"}], ["user", "'human'"]),
        ([*CHAT, {"role": "gpt", "content": "hi"}], ["assistant", "'gpt'"]),
        ([{"role": "developer", "content": "hi"}, *CHAT], ["system", "'developer'"]),
        ([*CHAT, {"role": "assistant", "function_call": {"name": "f"}}], ["function_call"]),
        ([{"role": "system", "content": "s", "tools": [ADD]}, *CHAT], ["the tools of message 0"]),
        ([{"role": "", "content": "hi"}], ["no such role"]),
        ([{"role": "user", "content": [{"type": "image", "text": "a cat"}]}], ["other than text"]),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "image": "a.png"}]}], ["other than text"]),
        ([*CHAT, {"role": "assistant", "content": None, "tool_calls": []}, *CHAT], ["no content"]),
        ([*CHAT, {"role": "assistant", "tool_calls": "add(1)"}, *CHAT], ["tool_calls", "JSON text", "add(1)"]),
        ([*CHAT, {"role": "assistant", "tool_calls": [7]}, *CHAT], ["tool_calls", "7"]),
        ([*CHAT, {"role": "assistant", "tool_calls": {"name": "f"}}, *CHAT], ["tool_calls"]),
        ([*CHAT, {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, *CHAT], ["with a name"]),
        ([*CHAT, {"role": "assistant", "tool_calls": [{"name": "f", "parameters": {"a": 1}}]}, *CHAT], ["arguments"]),
    ],
)
def test_messages_that_no_prompt_would_show(template, messages, pieces):
    with pytest.raises(ValueError) as caught:
        template.render(template.messages(messages))
    assert all(piece in str(caught.value) for piece in pieces)


@pytest.mark.parametrize(
    ("name", "content", "pieces"),
    [
        ("rows.jsonl", b'[{"prompt": "1"},\n {"prompt": "2"}]', ["own line"]),
        ("rows.jsonl", b'\xef\xbb\xbf{\n "prompt": "1"\n}\n', ["own line"]),
        ("rows.json", b'{"prompt": "1"}\n', ["*.json"]),
        ("rows.csv", b"prompt,answer\n1,2\n", ["*.csv"]),
        ("rows.jsonl", b"PAR1\x15\x00", ["Name it *.parquet"]),
        ("rows.jsonl", b"\x1f\x8b\x08\x00", ["Decompress"]),
        ("rows.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:a\n", ["git lfs pull"]),
        ("rows.jsonl", '{"prompt": "1"}\n'.encode("utf-16"), ["UTF-16"]),
    ],
)
def test_a_file_of_another_kind(load, tmp_path, name, content, pieces):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_bytes(content)
    with refused(DataError, *pieces, key="task.train.0", fault="kind of file"):
        load([], data=str(tmp_path / "other" / name))


@pytest.mark.long
@pytest.mark.parametrize(
    "messages",
    [[{"from": "human", "value": "hi"}], ['{"role": "user", "content": "hi"}'], [{"user": "hi"}]],
)
@pytest.mark.parametrize("stored", [False, True])
def test_sharegpt_and_the_like_are_refused(load, messages, stored):
    if stored and "from" not in messages[0]:
        return  # any list in JSON, which may be what the prompt is about
    with refused(DataError, "role", line=1, got=(*(messages[0] if isinstance(messages[0], dict) else ["str"]),)):
        load(
            [{"conversations": json.dumps(messages) if stored else messages}], model="tiny_tool", prompt="conversations"
        )


COOK = '{"name": "Ann", "role": "cook"}'


@pytest.mark.parametrize(
    "text",
    [
        '[{"value": 3}, {"value": 1}]',
        '{"value": 3}',
        "[1, 2]",
        "[{",
        '{"from": 1}',
        f"[{COOK}]",
        f"{COOK} as YAML",
        '[{"from": "A", "to": "B"}]\nIs there a path from A to B?',
    ],
)
def test_a_text_about_json_stays_a_text(load, text):
    [prompt] = load([{"prompt": text, "tools": None}]).train[0].prompts
    assert prompt.text == text and prompt.messages is None


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (ExactReward(kind="exact"), "2", 2),
        (NumericReward(kind="numeric"), 2, "two"),
        (MathVerifyReward(kind="math_verify"), "\\$1,250", "\\boxed{}"),
    ],
)
def test_right_answers_that_cannot_be_read_are_told_with_their_rows(load, make_pool, kind, good, bad):
    rows = [{"prompt": f"{n}", "answer": bad if n in (12, 15) else good} for n in range(20)]
    prompts = load(rows).train[0].prompts
    with make_pool("needs_solution", kinds={"kind": kind}, timeout=60.0) as pool:
        [note] = pool.check_answers(prompts, 0.1)
        assert all(piece in note for piece in ("2 of 20", "rows/12: kind: ", "rows/15: kind: "))
        assert pool.check_answers(prompts[:12], 0.1) == []
        with refused(RewardError, "rows/12", fault="answers", got="2 of 20", expected=("9%",)):
            pool.check_answers(prompts, 0.09)
    with make_pool("needs_solution") as pool:
        assert pool.check_answers(prompts, 0.0) == []
