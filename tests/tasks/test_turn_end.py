"""What ends a turn in a model's chats. Tokens of assets/tiny_gym: 0 <|pad|>, 1 <|end|>, 3 <|user|>, 4 <|assistant|>."""

import json
import shutil
from pathlib import Path

import jinja2
import pytest

from moe_rl.config.sampling_keys import RolloutConfig
from moe_rl.errors import ConfigError
from moe_rl.gateway.rendering import ChatRenderer
from moe_rl.models.hf import read_model
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.tasks.turn_end import endless_problem, turn_ends
from tests.support.refusals import refused, tells

ASSETS = Path(__file__).parents[2] / "assets"
EACH = (
    "{%% for m in messages %%}<|{{ m.role }}|>%s{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"
)
CLOSED = EACH % "{{ m.content }}<|end|>"
AT_THE_END = EACH % "{{ m.content }}{% if loop.last and not add_generation_prompt %}<|end|>{% endif %}"
OPEN = EACH % "{{ m.content }}"  # as in GLM-4.5: a turn ends where the next one begins
SPELT = EACH % "{{ m.content }}<|im_end|>\n"
WORDS = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:\n"
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}="
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
REFUSES = "{{ nothing.here }}"
CALLS = (
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|>{{ m.content }}"
    "{% if 'tool_calls' in m %}{{ m.tool_calls[0].function.arguments | tojson }}<|pad|>{% else %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)  # as in gpt-oss and GLM-4.5: a call ends with a token that ends no answer
THINKS = EACH % "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content | trim }}<|end|>\n"


def writes(template):
    compiled = jinja2.Template(template, undefined=jinja2.StrictUndefined)
    return lambda messages: compiled.render(messages=messages, add_generation_prompt=False)


@pytest.fixture(scope="module")
def codec():
    return TextCodec(ASSETS / "tiny_gym/policy", ())


def rollout(**keys):
    needed = {"prompts_per_step": 1, "group_size": 2, "max_prompt_tokens": 9, "max_completion_tokens": 9}
    return RolloutConfig.model_validate_json(json.dumps(needed | keys))


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (CLOSED, ("<|end|><|user|>", "<|end|>")),
        (AT_THE_END, ("<|user|>", "<|end|>")),
        (OPEN, ("<|user|>", "")),
        (WORDS, ("\n\n### user:\n", "\n\n### assistant:")),
        (BARE, ("", "=")),
        (THINKS, ("<|end|>\n<|user|>", "<|end|>\n")),
        (USERS, None),
        (REFUSES, None),
    ],
)
def test_what_a_template_writes_behind_an_answer(template, ends):
    assert turn_ends(writes(template)) == ends


@pytest.mark.parametrize(
    ("template", "stops", "keys"),
    [
        (CLOSED, (1,), {}),
        (CLOSED, (0, 1), {}),
        (CLOSED, (0,), {"stop_token_ids": [1]}),
        (CLOSED, (0,), {"stop": ["<|end|>"]}),
        (CLOSED, (0,), {"stop": ["</answer>"]}),  # the config has said how completions end
        (CLOSED, (0,), {"stop_token_ids": [6]}),
        (AT_THE_END, (1,), {}),
        (OPEN, (0, 3), {}),
        (SPELT, (0,), {"stop": ["<|im_end|>"]}),
        (WORDS, (0,), {"stop": ["###"]}),
        (BARE, (0,), {}),
        (USERS, (0,), {}),
        (REFUSES, (0,), {}),
        (THINKS, (1,), {}),
        (CALLS, (0, 1), {}),
        (CALLS, (1,), {"stop_token_ids": [0]}),
        (CALLS.replace("<|pad|>", "<|end|>"), (1,), {}),
    ],
)
def test_a_chat_that_ends(codec, template, stops, keys):
    assert endless_problem(writes(template), codec, stops, rollout(**keys)) is None


@pytest.mark.parametrize(
    ("template", "keys", "key", "got", "pieces"),
    [
        (CLOSED, {}, "rollout.stop_token_ids", "'<|end|>' (1)", ["rollout.stop_token_ids=[1]", "'<|pad|>' (0)"]),
        (CLOSED, {"stop_token_ids": [0]}, "rollout.stop_token_ids", "'<|end|>' (1)", []),
        (AT_THE_END, {}, "rollout.stop_token_ids", "'<|user|>' (3)", ["rollout.stop_token_ids=[3]"]),
        (OPEN, {}, "rollout.stop_token_ids", "'<|user|>' (3)", ["rollout.stop_token_ids=[3]"]),
        (WORDS, {}, "rollout.stop", ("### user",), ["'### user:'"]),
        (SPELT, {}, "rollout.stop_token_ids", "'<|user|>' (3)", []),
        (SPELT.replace("<|{{", "<{{"), {}, "rollout.stop", ("<|im_end|>",), ["'<|im_end|>'"]),
    ],
)
def test_a_chat_that_never_ends(codec, template, keys, key, got, pieces):
    problem = endless_problem(writes(template), codec, (0,), rollout(**keys))
    tells(problem, *pieces, key=key, got=got, fault="endless")


def test_a_tool_call_that_never_ends(codec):
    problem = endless_problem(writes(CALLS), codec, (1,), rollout())
    tells(problem, "a turn that calls a tool", key="rollout.stop_token_ids", got="'<|pad|>' (0)", fault="endless")


@pytest.fixture
def base(tmp_path):
    """The policy of tiny_gym, with <|pad|> as its end of sequence."""
    folder = tmp_path / "base"
    shutil.copytree(ASSETS / "tiny_gym/policy", folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text()) | {"eos_token_id": 0}
        (folder / name).write_text(json.dumps(settings))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.long
def test_the_gateway_refuses_a_chat_that_never_ends(base, codec):
    renderer = ChatRenderer(base, {"name": "default"})
    with refused(ConfigError, fault="endless", key="rollout.stop_token_ids", got="'<|end|>' (1)"):
        renderer.refuse_endless(codec, read_model(base), rollout())
    renderer.refuse_endless(codec, read_model(base), rollout(stop_token_ids=[1]))
    whole = ASSETS / "tiny_gym/policy"
    ChatRenderer(whole, {"name": "default"}).refuse_endless(codec, read_model(whole), rollout())
