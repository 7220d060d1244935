import json
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from moe_rl.config.load import load_config
from moe_rl.errors import DataError
from moe_rl.tasks.prompts import PromptSet, PromptSource, load_task
from moe_rl.tasks.tokenizer import TextCodec
from moe_rl.types import Prompt
from tests.support.refusals import refused, tells

EOS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def codec(folder):
    return TextCodec(folder, (EOS, 257))


def record(**changes):
    return {"id": "a", "prompt": "1+1=", "answer": "2", "level": "easy"} | changes


def write(path, *lines):
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(line + b"\n" for line in encoded))
    return path


# The codec


def test_the_tokenizer_of_these_tests_would_meddle(folder):
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("1234567").ids
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


def test_a_codec_needs_a_tokenizer(tmp_path, folder):
    with refused(DataError, fault="tokenizer", key="model.path"):
        TextCodec(tmp_path, (EOS,))
    (tmp_path / "tokenizer.json").write_text("{}")
    with refused(DataError, fault="tokenizer", key="model.path"):
        TextCodec(tmp_path, (EOS,))
    with refused(DataError, got="258"):
        TextCodec(folder, (EOS, 258))


# Prompt files


@pytest.fixture
def load(tmp_path, folder, codec):
    """Load a task whose training source has the given keys; held-out prompts are in order."""

    def load(*sources, limit=40, prompts=1, **task):
        write(tmp_path / "heldout.jsonl", *(record(id=f"h{n}") for n in range(4)))
        heldout = [{"name": "heldout", "data": str(tmp_path / "heldout.jsonl")}]
        config = {
            "run": {"name": "tests", "steps": 1},
            "model": {"path": str(folder)},
            "task": {
                "train": [{"name": f"s{at}", **source} for at, source in enumerate(sources)],
                "heldout": heldout,
                "rewards": {"exact": {"function": "moe_rl.tasks.rewards.exact_match"}},
                "pass_reward": "exact",
                **task,
            },
            "rollout": {
                "prompts_per_step": prompts,
                "group_size": 2,
                "max_prompt_tokens": limit,
                "max_completion_tokens": 6,
            },
            "train": {"microbatch_tokens": 64, "optimizer": {"lr": 1e-6}},
            "eval": {"prompts": 2},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        return load_task(load_config(tmp_path / "config.yaml"), codec)

    return load


def jsonl(path, *lines, **keys):
    return {"data": str(write(path, *lines)), "id": "id", "level": "level"} | keys


def test_prompts_of_a_file(tmp_path, load, codec):
    strange = "line\u2028separator \x85 and \u20ac"
    unescaped = json.dumps(record(id=7, prompt=strange, unit={"m": [2, None]}), ensure_ascii=False).encode()
    source = jsonl(tmp_path / "p.jsonl", record(), unescaped)
    (found,) = load(source).train
    assert found.prompts == [
        Prompt("s0/a", "1+1=", codec.encode("1+1="), record(), level="easy"),
        Prompt(
            "s0/7", strange, codec.encode(strange), record(id=7, prompt=strange, unit={"m": [2, None]}), level="easy"
        ),
    ]
    (tmp_path / "p.jsonl").write_bytes((tmp_path / "p.jsonl").read_bytes().removesuffix(b"\n"))
    assert load(source).train == (found,)


def test_other_columns_and_no_id(tmp_path, load):
    source = {"data": str(write(tmp_path / "p.jsonl", {"question": "a"}, {"question": "a"})), "prompt": "question"}
    (found,) = load(source).train
    assert [(prompt.id, prompt.text, prompt.level) for prompt in found.prompts] == [
        ("s0/0", "a", None),
        ("s0/1", "a", None),
    ]


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        (b"{", ["JSON"]),
        (b'{"id": "b"} {}', ["JSON"]),
        (b"[" * 100_000, ["JSON"]),
        (b"[]", ["list"]),
        (b"\xff\xfe", ["UTF-8", "0"]),
        (b'\xef\xbb\xbf{"id": "b"}', ["JSON"]),
        (b'{"id": "b", "id": "c", "prompt": "x", "answer": "2", "level": "l"}', []),
        ({"id": "b", "prompt": "x", "answer": "2"}, ["level"]),
        (record(id="b", level=None), ["level", "null"]),
        (record(id=""), ["id"]),
        (record(id=True), ["bool"]),
        (record(id=["b"]), ["list"]),
        (record(), ["'a'", "line 1"]),
        (record(id="b", prompt="\ud800"), []),
        (record(id="b", answer=["\udfff"]), []),
        (record(id="b", prompt=7), ["int"]),
        (record(id="b", prompt={"text": "x"}), ["dict"]),
        (record(id="b", prompt=""), ["0 tokens"]),
        (record(id="b", prompt="x" * 41), ["41 tokens", "rollout.max_prompt_tokens", "at most 40"]),
        (record(id="b", level=""), ["the column level is empty", "drop: [missing]"]),
    ],
)
def test_a_bad_line_is_named(tmp_path, load, line, pieces):
    source = jsonl(tmp_path / "p.jsonl", record(), line, record(id="z"))
    with refused(DataError, *pieces, key="task.train.0", file=source["data"], line=2) as caught:
        load(source)
    assert len(caught.value.problems) == 1


def test_equal_problems_are_counted(tmp_path, load):
    lines = [record(), *[record()] * 29, *[record(id=f"{n}", prompt="") for n in range(3)], b"{", b"}"]
    source = jsonl(tmp_path / "p.jsonl", *lines)
    with pytest.raises(DataError) as caught:
        load(source)
    duplicate, empty, syntax = caught.value.problems
    tells(duplicate, "28 more", "line 3", fault="duplicate", line=2)
    tells(empty, "2 more", "line 32", fault="empty", line=31)
    tells(syntax, "1 more", "line 35", line=34)


def test_what_the_config_drops_is_counted(tmp_path, load):
    lines = [record(), record(), record(id="b", prompt=""), record(id="c", prompt="x" * 50), record(id="d", level=None)]
    source = jsonl(tmp_path / "p.jsonl", *lines, record(id="e"), drop=["duplicate", "empty", "too_long", "missing"])
    task = load(source)
    assert [prompt.id for prompt in task.train[0].prompts] == ["s0/a", "s0/e"] and task.count == 2
    assert set(task.train[0].notes) == {f"left out 1 {kind}" for kind in ("duplicate", "empty", "too long", "missing")}
    with refused(DataError, key="rollout.prompts_per_step", got=3):
        load(source, prompts=3)
    with refused(DataError, fault="empty", got=("1 rows",)):
        load(jsonl(tmp_path / "p.jsonl", record(prompt=""), drop=["empty"]))


def test_problems_of_all_sources_are_told_together(tmp_path, load):
    sources = [jsonl(tmp_path / f"{n}.jsonl", b"{") for n in range(2)] + [{"data": str(tmp_path / "absent.jsonl")}]
    with pytest.raises(DataError) as caught:
        load(*sources)
    assert [problem.about["key"] for problem in caught.value.problems] == [f"task.train.{n}" for n in range(3)]
    tells(caught.value.problems[2], fault="unreadable")


def test_no_prompts(tmp_path, load):
    with refused(DataError, fault="empty", key="task.train.0"):
        load(jsonl(tmp_path / "p.jsonl"))
    with pytest.raises(DataError):
        PromptSource([], 1)
    with pytest.raises(DataError):
        PromptSource([PromptSet("none")], 1)


def test_a_parquet_file(tmp_path, load):
    import pyarrow
    from pyarrow import parquet

    rows = [record(id=n, prompt=f"{n}", hints=["a", None], when=datetime(2026, 1, n + 1)) for n in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet", row_group_size=2)
    source = {"data": str(tmp_path / "p.parquet"), "id": "id"}
    (found,) = load(source).train
    assert [prompt.text for prompt in found.prompts] == ["0", "1", "2"]
    assert found.prompts[1].columns == record(id=1, prompt="1", hints=["a", None])
    assert len(found.notes) == 1 and "when" in found.notes[0]
    with refused(DataError, key="task.train.0", file=source["data"], row=0, fault="missing"):
        load(source | {"prompt": "question"})
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    with refused(DataError, fault="unreadable", file=source["data"]):
        load(source)


@pytest.mark.long
def test_a_folder_or_name_goes_through_datasets(tmp_path, load, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [record(id=f"{n}", prompt=f"{n}") for n in range(3)]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "saved")
    source = {"data": str(tmp_path / "saved"), "id": "id", "split": "train"}
    (found,) = load(source).train
    assert [prompt.columns for prompt in found.prompts] == rows
    (tmp_path / "files").mkdir()
    write(tmp_path / "files/train.jsonl", *rows)
    assert load(source | {"data": str(tmp_path / "files")}).train == (found,)
    with refused(DataError, "train", key="task.train.0.split", got="test"):
        load(source | {"split": "test"})
    with refused(DataError, fault="data set", key="task.train.0"):
        load(source | {"data": "openai/gsm8k"})


@pytest.mark.long
def test_a_generator_is_endless_and_pure(load):
    pytest.importorskip("reasoning_gym")
    source = {"data": "reasoning_gym:chain_sum", "prompt": "question", "seed": 3, "options": {"max_terms": 2}}
    task, again, other = load(source, limit=200), load(source, limit=200), load(source | {"seed": 4}, limit=200)
    assert task.count is None
    prompts = PromptSource(task.train, 1)
    assert prompts.at(100_000, 3) == [again.train[0].make(n) for n in (100_000, 100_001, 100_002)]
    assert {other.train[0].make(n).text for n in range(50)} != {task.train[0].make(n).text for n in range(50)}
    assert task.train[0].make(9).id == "s0/9" and task.train[0].make(9).columns["answer"].lstrip("-").isdigit()
    lengths = [len(task.train[0].make(n).token_ids) for n in range(64)]
    middle = sorted(lengths)[32]
    with refused(DataError, fault="too_long", key="task.train.0", expected=f"at most {middle}"):
        load(source, limit=middle)
    fitting = load(source | {"drop": ["too_long"]}, limit=middle).train[0]
    assert max(len(fitting.make(n).token_ids) for n in range(64)) == middle
    kept = [n for n in range(64) if lengths[n] <= middle]
    assert all(fitting.make(n).text == task.train[0].make(n).text for n in kept) and len(kept) < 64
    with refused(DataError, fault="redraws"):
        load(source | {"drop": ["too_long"]}, limit=3)


# The source


def source(count, seed=1):
    return PromptSource([PromptSet("all", [Prompt(str(i), "") for i in range(count)])], seed)


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
    whole = ids(source(count, seed).at(0, sum(takes)))
    asked_before = source(count, seed)
    at = 0
    for n in takes:
        asked_before.at(detour, n)
        assert ids(asked_before.at(at, n)) == ids(source(count, seed).at(at, n)) == whole[at : at + n]
        at += n


@given(count=st.integers(1, 40), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
@settings(deadline=None)
def test_every_epoch_takes_every_prompt_once(count, seed, epoch):
    prompts = source(count, seed)
    assert sorted(ids(prompts.at(epoch * count, count)), key=int) == [str(i) for i in range(count)]


def test_epochs_and_seeds_differ():
    orders = set()
    for seed in (1, 2, 2**32 - 1, 2**32, 1 + 2**33):
        prompts = source(50, seed)
        orders |= {tuple(ids(prompts.at(50 * epoch, 50))) for epoch in range(20)}
    assert len(orders) == 5 * 20


def test_the_order_is_uniform():
    # Each of 4 prompts is first in about a quarter of 4000 epochs: 1000, standard deviation 27.
    prompts = source(4)
    first = [ids(prompts.at(4 * epoch, 1))[0] for epoch in range(4000)]
    assert all(abs(first.count(str(i)) - 1000) < 140 for i in range(4))


def test_the_order_never_changes_between_releases():
    # A run resumed under a later version must go on with the same prompts.
    assert ids(source(8, 1).at(0, 16)) == list("0574263121065734")


def test_senseless_cursors_are_refused():
    with refused(ValueError, got=("cursor -1",)):
        source(3).at(-1, 1)
    with refused(ValueError, got=("count -1",)):
        source(3).at(0, -1)


def several(weights, counts, seed=1):
    return PromptSource(
        [
            PromptSet(str(at), [Prompt(f"{at}/{n}", "") for n in range(count)], weight=weight)
            for at, (weight, count) in enumerate(zip(weights, counts, strict=True))
        ],
        seed,
    )


@given(
    sets=st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(1, 9)), min_size=2, max_size=5),
    at=st.integers(0, 300),
    count=st.integers(0, 40),
)
@settings(deadline=None)
def test_several_sets_keep_their_shares_at_any_cursor(sets, at, count):
    weights, counts = zip(*sets, strict=True)
    whole = ids(several(weights, counts).at(0, at + count))
    assert ids(several(weights, counts).at(at, count)) == whole[at:]
    for number, weight in enumerate(weights):
        own = [one for one in whole if one.startswith(f"{number}/")]
        assert abs(len(own) - len(whole) * weight / sum(weights)) <= len(sets) / 2 + 1e-6
        for start in range(0, len(own), counts[number]):
            epoch = own[start : start + counts[number]]
            assert len(set(epoch)) == len(epoch)


def test_the_order_of_several_sets_never_changes_between_releases():
    prompts = several((3, 1), (4, 4))
    assert ids(prompts.at(0, 12)) == [
        "0/0",
        "0/2",
        "1/0",
        "0/3",
        "0/1",
        "0/2",
        "1/3",
        "0/1",
        "0/0",
        "0/3",
        "1/1",
        "0/2",
    ]
