import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from moe_rl.errors import DataError
from moe_rl.tasks.prompts import PromptSource, TextCodec, load_prompts
from moe_rl.types import Prompt
from tests.support.refusals import refused

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
    with refused(DataError, fault="tokenizer"):
        TextCodec(tmp_path / "tokenizer.json", (EOS,))
    with refused(DataError, fault="tokenizer"):
        TextCodec(tmp_path / "absent.json", (EOS,))
    with refused(DataError, got="258"):
        TextCodec(tokenizer_file, (EOS, 258))


# Prompt files


def test_load_prompts(tmp_path, tokenizer_file, codec):
    strange = "line\u2028separator \x85 and \u20ac"
    unescaped = json.dumps(record(id="b", prompt=strange), ensure_ascii=False).encode()
    path = write(tmp_path / "p.jsonl", record(), unescaped)
    prompts = load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    assert prompts == [
        Prompt("a", "1+1=", codec.encode("1+1="), record(), level="easy"),
        Prompt("b", strange, codec.encode(strange), record(id="b", prompt=strange), level="easy"),
    ]
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert load_prompts(path, tokenizer_file, max_prompt_tokens=40) == prompts


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        (b"", ["JSON"]),
        (b"{", ["JSON"]),
        (b'{"id": "b"} {}', ["JSON"]),
        (b"[" * 100_000, ["JSON"]),
        (b"[]", ["list"]),
        (b"\xff\xfe", ["UTF-8", "0"]),
        (b'\xef\xbb\xbf{"id": "b"}', ["JSON"]),
        (b'{"id": "b", "id": "c", "prompt": "x", "answer": "2", "level": "l"}', []),
        ({"id": "b", "prompt": "x", "answer": "2"}, ["level"]),
        (record(id="b", hint="no"), ["'hint'"]),
        (record(id="b", answer=2), ["answer", "int"]),
        (record(id="b", level=None), ["level", "NoneType"]),
        (record(id=""), ["id"]),
        (record(), ["id 'a'", "line 1"]),
        (record(id="b", prompt="\ud800"), ["prompt"]),
        (record(id="b", prompt=""), ["0 tokens"]),
        (record(id="b", prompt="x" * 41), ["41 tokens", "rollout.max_prompt_tokens = 40"]),
    ],
)
def test_a_bad_line_is_named(tmp_path, tokenizer_file, line, pieces):
    path = write(tmp_path / "p.jsonl", record(), line, record(id="z"))
    with refused(DataError, *pieces, file=path, line=2) as caught:
        load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    assert len(caught.value.problems) == 1


def test_many_problems_at_once(tmp_path, tokenizer_file):
    path = write(tmp_path / "p.jsonl", *[record()] * 30)
    with pytest.raises(DataError) as caught:
        load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    *first, rest = caught.value.problems
    assert [problem.about["line"] for problem in first] == list(range(2, 22))
    assert str(path) in rest and "9" in rest.replace(str(path), "")


def test_no_prompts(tmp_path, tokenizer_file):
    path = tmp_path / "p.jsonl"
    with refused(DataError, fault="unreadable", file=path):
        load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    path.write_bytes(b"")
    with refused(DataError, fault="empty", file=path):
        load_prompts(path, tokenizer_file, max_prompt_tokens=40)
    with pytest.raises(DataError):
        PromptSource([], 1)


# The source


def source(count, seed=1):
    return PromptSource([Prompt(str(i), "") for i in range(count)], seed)


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
    with refused(ValueError, argument="cursor", got=-1):
        source(3).seek(-1)
    with refused(ValueError, got=("count -1",)):
        source(3).take(-1)
