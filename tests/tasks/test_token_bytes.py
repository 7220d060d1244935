"""Tests that the bytes of tokens are those of the text, for each kind of tokenizer."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from moe_rl.tasks.tokenizer import _BYTES, TextCodec
from tests.tasks.test_tokenizer import POLICY, completion, sentencepiece_file, tiktoken_file


def byte_level_file(folder):
    (folder / "tokenizer.json").write_bytes((POLICY / "tokenizer.json").read_bytes())


def fallback_file(folder):
    """Write a tokenizer as Llama's: spaces are drawn, and what is not in the vocabulary is written byte by byte."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "é": 258, "▁a": 259}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<é>", special=True, normalized=False)])
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    "write",
    [
        byte_level_file,
        fallback_file,
        pytest.param(tiktoken_file, marks=pytest.mark.long),
        pytest.param(sentencepiece_file, marks=pytest.mark.long),
    ],
)
def test_the_bytes_of_tokens_are_those_of_the_text(tmp_path, write):
    """Also where a token is a part of a character. What ends within one has the bytes that there are."""
    write(tmp_path)
    (tmp_path / "config.json").write_bytes((POLICY / "config.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    codec = TextCodec(tmp_path, ())
    texts = ["the quick fox 12", " a", "a  a "]
    if write is not sentencepiece_file:  # its vocabulary has no other characters
        texts += ["café 😊", "a😊é\n\0\x7f\xa0\xadŁ", "<é>a <é>", "日本語 한국어"]
    for text in texts:
        ids = codec.encode(text)
        assert b"".join(codec.pieces(ids)) == codec.decode(ids).encode(), text
    if write is not sentencepiece_file:
        ids = codec.encode("a😊")
        assert len(ids) > 4 and b"".join(codec.pieces(ids[:-2])) == codec.decode(ids).encode()[:-2]
    assert codec.pieces([10**6]) == ["\ufffd".encode()] and codec.pieces([]) == []


@pytest.mark.parametrize("write", [byte_level_file, fallback_file])
def test_the_tokens_before_a_stop_string_are_its_text(tmp_path, write):
    """Also where the stop string begins within a token, and where tokens are parts of a character."""
    write(tmp_path)
    (tmp_path / "config.json").write_bytes((POLICY / "config.json").read_bytes())
    codec, within = TextCodec(tmp_path, ()), 0
    ids = codec.encode("a café 😊 a the quick fox a a")
    for last in range(1, len(ids) + 1):
        text = codec.decode(ids[:last])
        for start in range(len(text)):
            if text.index(text[start:]) == start and "\ufffd" not in text:
                stopped = completion(ids[:last], text[start:])
                before = codec.before_stop(stopped)
                assert codec.decode(before) == codec.text(stopped) == text[:start]
                within += before != ids[: len(before)]
    assert within


def test_every_byte_has_a_letter_in_byte_level_vocabularies():
    assert set(_BYTES) == set(pre_tokenizers.ByteLevel.alphabet()) and len(set(_BYTES.values())) == 256
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    for code in (*range(256), 0x7FF, 0x800, 0xFFFD, 0x1F60A, 0x10FFFF):
        ((letters, _),) = split(chr(code))
        assert b"".join(_BYTES[letter] for letter in letters) == chr(code).encode()
