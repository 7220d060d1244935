import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from moe_rl.errors import DataError
from moe_rl.tasks.prompts import PromptSource, TextCodec, load_prompts
from moe_rl.types import Prompt

EOS = 256


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """One token per byte; 256 is the end of sequence, 257 another special token, 258 and 259 unknown, 260 special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|pad|>", special=True)])
    # What a codec must not do to a prompt, all in one file: cut it, pad it, prepend to it.
    tokenizer.post_processor = processors.TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 257)])
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9, pad_id=257, pad_token="<|pad|>")
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def codec(tokenizer_file):
    return TextCodec(tokenizer_file, (EOS, 257))


def record(**changes):
    return {"id": "a", "prompt": "1+1=", "answer": "2", "level": "easy"} | changes


def write(path, *lines):
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


# The codec


def test_the_tokenizer_of_these_tests_would_meddle(tokenizer_file):
    ids = Tokenizer.from_file(str(tokenizer_file)).encode("1234567").ids
    assert ids[0] == 257 and len(ids) == 9 and len(set(ids)) == 5


@given(st.text())
def test_codec_round_trip(codec, text):
    ids = codec.encode(text)
    assert codec.decode(ids) == text
    assert codec.decode((*ids, EOS)) == text + "<|end|>"
    if not any(special in text for special in ("<|end|>", "<|pad|>")):
        assert len(ids) == len(text.encode())


def test_decode_hides_nothing(codec):
    a, b = codec.encode("a"), codec.encode("b")
    assert codec.decode((*a, EOS, EOS)) == "a<|end|><|end|>"
    assert codec.decode((*a, EOS, *b)) == "a<|end|>b"
    assert codec.decode((257, *a, 257)) == "<|pad|>a<|pad|>"
    assert codec.decode((*a, 258, *b, 99999, EOS)) == "a\ufffdb\ufffd<|end|>"
    assert codec.decode((EOS,)) == "<|end|>" and codec.decode(()) == ""
    assert codec.encode("a<|end|>") == (*a, EOS)


def test_a_codec_needs_a_tokenizer(tmp_path, tokenizer_file):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a readable tokenizer"):
        TextCodec(tmp_path / "tokenizer.json", (EOS,))
    with pytest.raises(DataError, match="not a readable tokenizer"):
        TextCodec(tmp_path / "absent.json", (EOS,))
    with pytest.raises(DataError, match="got 258"):
        TextCodec(tokenizer_file, (EOS, 258))


# Prompt files


def test_load_prompts(tmp_path, tokenizer_file, codec):
    strange = "line\u2028separator \x85 and \u20ac"
    unescaped = json.dumps(record(id="b", prompt=strange), ensure_ascii=False).encode()
    path = write(tmp_path / "p.jsonl", record(), unescaped)
    prompts = load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    assert prompts == [
        Prompt("a", "1+1=", "2", "easy", codec.encode("1+1=")),
        Prompt("b", strange, "2", "easy", codec.encode(strange)),
    ]
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert load_prompts(path, tokenizer_file, max_prompt_tokens=40) == prompts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"id": "b"} {}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "not an object: got list"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'\xef\xbb\xbf{"id": "b"}', "not JSON"),
        (b'{"id": "b", "id": "c", "prompt": "x", "answer": "2", "level": "l"}', "a key occurs twice"),
        ({"id": "b", "prompt": "x", "answer": "2"}, "lacks level"),
        (record(id="b", hint="no"), "has unknown 'hint'"),
        (record(id="b", answer=2), "answer is not a string: got int"),
        (record(id="b", level=None), "level is not a string: got NoneType"),
        (record(id=""), "id is empty"),
        (record(), "duplicate id 'a', first on line 1"),
        (record(id="b", prompt="\ud800"), "half a surrogate pair"),
        (record(id="b", prompt=""), "prompt of 0 tokens"),
        (record(id="b", prompt="x" * 41), "prompt of 41 tokens, expected 1 to rollout.max_prompt_tokens = 40"),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer_file, line, message):
    path = write(tmp_path / "p.jsonl", record(), line, record(id="z"))
    with pytest.raises(DataError) as caught:
        load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    [problem] = str(caught.value).splitlines()
    assert problem.startswith(f"{path}:2: ") and message in problem


def test_many_problems_at_once(tmp_path, tokenizer_file):
    path = write(tmp_path / "p.jsonl", *[record()] * 30)
    with pytest.raises(DataError) as caught:
        load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines[:20]] == [f"{path}:{number}" for number in range(2, 22)]
    assert lines[20:] == [f"{path}: and 9 more"]


def test_no_prompts(tmp_path, tokenizer_file):
    path = tmp_path / "p.jsonl"
    with pytest.raises(DataError, match="cannot read"):
        load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="no prompts.*p.jsonl"):
        load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    with pytest.raises(DataError, match="at least one"):
        PromptSource([], 1)


# The source


def source(count, seed=1):
    return PromptSource([Prompt(str(i), "", "", "") for i in range(count)], seed)


def ids(prompts):
    return [prompt.id for prompt in prompts]


@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 2**64),
    takes=st.lists(st.integers(0, 90), max_size=8),
    detour=st.integers(0, 10**9),
)
@settings(deadline=None)
def test_the_order_is_a_pure_function_of_the_cursor(count, seed, takes, detour):
    whole = ids(source(count, seed).take(sum(takes)))
    piecewise = source(count, seed)
    at = 0
    for n in takes:
        resumed = source(count, seed)
        resumed.seek(at)
        piecewise.seek(detour)
        piecewise.take(n)
        piecewise.seek(at)
        assert ids(piecewise.peek(at, n)) == ids(piecewise.take(n)) == ids(resumed.take(n)) == whole[at : at + n]
        at += n
        assert piecewise.cursor == resumed.cursor == at


@given(count=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_every_epoch_takes_every_prompt_once(count, seed, epoch):
    prompts = source(count, seed)
    prompts.seek(epoch * count)
    assert sorted(ids(prompts.take(count)), key=int) == [str(i) for i in range(count)]


def test_epochs_and_seeds_differ():
    orders = set()
    for seed in (1, 2, 2**32 - 1, 2**32, 1 + 2**33):
        prompts = source(50, seed)
        orders |= {tuple(ids(prompts.take(50))) for _ in range(20)}
    assert len(orders) == 5 * 20


def test_the_order_is_uniform():
    # Each of 4 prompts is first in about a quarter of 4000 epochs: 1000, standard deviation 27.
    prompts = source(4)
    first = [ids(prompts.take(4))[0] for _ in range(4000)]
    assert all(abs(first.count(str(i)) - 1000) < 140 for i in range(4))


def test_the_order_never_changes_between_releases():
    # A run resumed under a later version must go on with the same prompts.
    assert ids(source(8, 1).take(16)) == list("0574263121065734")


def test_senseless_cursors_are_refused():
    with pytest.raises(ValueError, match="got -1"):
        source(3).seek(-1)
    with pytest.raises(ValueError, match="count -1"):
        source(3).take(-1)
