"""Chat templates, and tokenizers that are no tokenizer.json. transformers takes seconds to import."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from moe_rl.config.prompt_sources import ChatConfig
from moe_rl.errors import DataError
from moe_rl.tasks.tokenizer import ChatTemplate, TextCodec
from moe_rl.types import Completion, sampled_by
from tests.support.refusals import refused

POLICY = Path(__file__).parents[2] / "assets/tiny_moe/policy"
TEMPLATE = (
    "{% if tools %}{{ tools[0]['function']['name'] }} {{ tools[0]['function']['description'] }}\n{% endif %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    "{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}

pytestmark = pytest.mark.long


@pytest.fixture
def model(tmp_path):
    """The tiny policy's tokenizer with a chat template."""

    def make(template=TEMPLATE):
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            (tmp_path / name).write_bytes((POLICY / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text(template)
        return tmp_path

    return make


def chat(**keys):
    return ChatConfig.model_validate_json(json.dumps(keys))


def user(content, role="user"):
    return {"role": role, "content": content}


def test_a_prompt_is_rendered_as_transformers_does_and_tokenised_once(model):
    from transformers import AutoTokenizer

    folder = model()
    template = ChatTemplate(folder, chat(system="Be short.", template_kwargs={"enable_thinking": False}, tools=[ADD]))
    messages = template.messages("1+1=")
    assert [message["role"] for message in messages] == ["system", "user"]
    text = template.render(messages)
    assert text == "add adds\n<system>Be short.\n<user>1+1=\n<assistant>False"
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        list(messages), tools=[ADD], add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert list(TextCodec(folder, ()).encode(text)) == theirs


def test_messages_pass_as_they_are(model):
    template = ChatTemplate(model(), None)
    given = [user("hi"), user("hello", "assistant") | {"tool_calls": None}, user(" 2+2= ")]
    assert template.render(template.messages(given)) == "<user>hi\n<assistant>hello\n<user> 2+2= \n<assistant>"


@pytest.mark.parametrize(
    ("prompt", "system"),
    [
        ([], None),
        ([user("1"), user("2", "assistant")], None),
        ([user("1", "system"), user("2")], "Be short."),
        (["text"], None),
        ([{"content": "no role"}], None),
        ([{"role": "user"}], None),
        ([{"role": "user", "content": [{"type": "image"}]}], None),
        ([{"role": "user", "content": 7}], None),
    ],
)
def test_a_prompt_that_is_no_chat(model, prompt, system):
    with pytest.raises(ValueError):
        ChatTemplate(model(), chat(system=system)).messages(prompt)


@pytest.mark.parametrize(
    ("template", "dropped"),
    [
        ("{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}", 0),
        ("{{ messages[0].content }}{{ messages[1].content }}", 2),
        ("{{ messages[0].content }}{{ messages[1].content[:3] }}{{ messages[2].content }}", 1),
    ],
)
def test_a_template_that_drops_a_message_is_told(model, template, dropped):
    chosen = ChatTemplate(model(template), chat(system="Be short."))
    with pytest.raises(ValueError, match=f"message {dropped}"):
        chosen.render(chosen.messages([user("1+1="), user("2+2=")]))


def test_a_template_that_refuses(model):
    chosen = ChatTemplate(model("{{ raise_exception('no such role') }}"), None)
    with pytest.raises(ValueError, match="no such role"):
        chosen.render([user("1")])


@pytest.mark.parametrize(
    ("keys", "key"),
    [({"template_kwargs": {"thinking": True}}, "template_kwargs"), ({"tools": [ADD]}, "tools")],
)
def test_a_setting_that_the_template_does_not_use(model, keys, key):
    with refused(DataError, fault="unused", key=f"task.chat.{key}"):
        ChatTemplate(model("{{ messages[0].content }}"), chat(**keys))


def test_a_model_without_a_template():
    with refused(DataError, fault="no template", key="task.chat"):
        ChatTemplate(POLICY, chat())


# Other tokenizer files


def tiktoken_file(folder):
    lines = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)] + [
        base64.b64encode(b"ox") + b" 256"
    ]
    (folder / "tokenizer.model").write_bytes(b"\n".join(lines) + b"\n")


def sentencepiece_file(folder):
    import sentencepiece

    text = folder / "text"
    text.write_text("\n".join(f"the quick brown fox {n} jumps over {n * 7}" for n in range(500)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=90, model_type="bpe", minloglevel=2
    )


@pytest.mark.parametrize("write", [tiktoken_file, sentencepiece_file])
def test_a_tokenizer_without_tokenizer_json(tmp_path, write):
    from transformers import AutoTokenizer

    write(tmp_path)
    (tmp_path / "config.json").write_bytes((POLICY / "config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    codec, theirs = TextCodec(tmp_path, (0,)), AutoTokenizer.from_pretrained(tmp_path)
    ids = codec.encode("the quick fox 12")
    assert list(ids) == theirs.encode("the quick fox 12", add_special_tokens=False)
    assert codec.decode(ids) == "the quick fox 12" and codec.vocabulary == len(theirs)
    # a sentencepiece tokenizer drops the space at the start of a completion, which the sampler sees
    text = codec.text(completion(codec.encode("the quick"), " the"))
    assert text == "" and codec.text(completion(codec.encode("the quick"), "quick")).strip() == "the"
    with refused(DataError, request="k", expected="'slow'"):
        codec.text(completion(codec.encode("the quick"), "slow"))


def test_a_stop_string_that_no_tokens_give_is_refused(tmp_path):
    words = Tokenizer(WordLevel({"stop": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "tokenizer.json"))
    TextCodec(tmp_path, (), ("stop",))
    with refused(DataError, key="rollout.stop.1", got="'##'"):
        TextCodec(tmp_path, (), ("stop", "##"))


def completion(tokens, stop_string):
    return Completion(
        "k",
        (1,),
        tuple(tokens),
        np.zeros(len(tokens), np.float32),
        "stop",
        sampled_by(0, len(tokens)),
        None,
        None,
        stop_string,
    )


def test_a_tokenizer_with_code_of_its_own_is_refused(tmp_path):
    tiktoken_file(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["t.T", None]}}))
    with refused(DataError, fault="tokenizer code", folder=tmp_path):
        TextCodec(tmp_path, ())
