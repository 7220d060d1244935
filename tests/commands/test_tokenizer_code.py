"""Tests that a tokenizer that is Python code becomes a tokenizer.json, with the caller's word and with equal ids."""

import base64
import json
import shutil

import pytest

from moe_rl.cli import main
from moe_rl.errors import DataError
from moe_rl.models.hf import read_model
from moe_rl.tasks.tokenizer import ChatTemplate, TextCodec
from tests.config.conftest import _write_model
from tests.support.refusals import refused

SPECIAL = ["[BOS]", "[EOS]", "<|im_user|>", "<|im_middle|>", "<|im_end|>"]
# In the manner of Moonlight's: a pattern that transformers does not take by itself, and special tokens behind the rest.
CODE = r"""
import sys
import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers.tokenization_utils import PreTrainedTokenizer

open({witness!r}, "w").close()


class CodedTokenizer(PreTrainedTokenizer):
    vocab_files_names = {{"vocab_file": "tiktoken.model"}}
    pattern = "|".join([
        r"[\p{{Han}}]+",
        r"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]+(?i:'s|'t)?",
        r"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}&&[^\p{{Han}}]]+(?i:'s|'t)?",
        r"\p{{N}}{{1,3}}", r" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    ])

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        special = {{name: len(ranks) + at for at, name in enumerate({special!r})}}
        self.model = tiktoken.Encoding("coded", pat_str=self.pattern, mergeable_ranks=ranks, special_tokens=special)
        super().__init__(**kwargs)

    vocab_size = property(lambda self: self.model.n_vocab)

    def get_vocab(self):
        return {{str(number): number for number in range(self.model.n_vocab)}}

    def encode(self, text, **kwargs):
        return {encode}
"""
ENCODE = 'self.model.encode(text, allowed_special="all")'
TEXT = "The fox doesn't, 12345 \u4e2d\u6587 ABC"


@pytest.fixture
def coded(tmp_path):
    """coded(encode) -> a folder with a tokenizer of code, whose expression for `encode` is this."""

    def make(encode=ENCODE):
        folder = _write_model(tmp_path / "model", vocab_size=300)
        (folder / "tokenizer.json").unlink()
        han = "\u4e2d".encode()
        tokens = [bytes([byte]) for byte in range(256)]
        tokens += [b"th", b"the", b" t", b"ox", b" f", b" fox", b"12", b"123", han[:2], han, "\u6587".encode()[:2]]
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
        (folder / "tiktoken.model").write_bytes(b"".join(lines))
        code = CODE.format(witness=str(tmp_path / "ran"), special=SPECIAL, encode=encode)
        (folder / "tokenization_coded.py").write_text(code)
        settings = {
            "auto_map": {"AutoTokenizer": ["tokenization_coded.CodedTokenizer", None]},
            "tokenizer_class": "CodedTokenizer",
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "chat_template": "{% for one in messages %}<|im_user|>{{ one.content }}<|im_end|>{% endfor %}",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder, len(tokens)

    return make


@pytest.fixture
def export(tmp_path, capsys):
    def run(folder, *more):
        status = main(["export", "--tokenizer", str(folder), "--out", str(tmp_path / "out"), *more])
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def digest_in(said):
    return said.rpartition("--run-code ")[2].strip()


def test_a_tokenizer_of_code_becomes_a_file_once_its_code_is_allowed(coded, export, tmp_path):
    folder, tokens = coded()
    with refused(DataError, f"moe-rl export --tokenizer {folder}", fault="tokenizer code"):
        TextCodec(folder, ())
    status, said = export(folder)
    assert status == 2 and "tokenization_coded.py" in said and not (tmp_path / "ran").exists()
    digest = digest_in(said)
    with open(folder / "tokenization_coded.py", "a") as file:
        file.write("# changed\n")
    status, said = export(folder, "--run-code", digest)
    assert status == 2 and digest in said != digest_in(said) and not (tmp_path / "ran").exists()
    status, said = export(folder, "--run-code", digest_in(said))
    assert status == 0 and f"{tokens + 5} tokens" in said and (tmp_path / "ran").exists(), said

    for file in (tmp_path / "out").iterdir():
        shutil.copy(file, folder)
    (tmp_path / "ran").unlink()
    codec = TextCodec(folder, (tokens + 1,))
    assert codec.decode(codec.encode(TEXT)) == TEXT and codec.vocabulary == tokens + 5
    assert codec.encode("<|im_user|>the<|im_end|>") == (tokens + 2, 257, tokens + 4)
    assert codec.encode(" \u4e2dthe") == (32, 265, 257)  # by transformers' own pattern, one piece
    rendered = ChatTemplate(folder, None).render([{"role": "user", "content": "fox"}])
    assert "<|im_user|>fox<|im_end|>" in str(rendered) and not (tmp_path / "ran").exists()
    assert read_model(folder).vocab == 300


def test_a_file_with_other_ids_than_the_code_is_not_written(coded, export, tmp_path):
    folder, _ = coded(ENCODE + "[::-1]")
    status, said = export(folder, "--run-code", digest_in(export(folder)[1]))
    assert status == 2 and "other ids" in said and not (tmp_path / "out").exists()


def test_code_of_another_repository_and_a_folder_without_code_are_refused(coded, export):
    folder, _ = coded()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"]["AutoTokenizer"][0] = "other/place--tokenization_coded.CodedTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    status, said = export(folder)
    assert status == 2 and "another repository" in said
    del settings["auto_map"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    status, said = export(folder)
    assert status == 2 and "no code" in said


def test_code_beside_a_tokenizer_json_is_not_run(coded, tmp_path):
    folder, _ = coded()
    shutil.copy("assets/tiny_moe/policy/tokenizer.json", folder)
    codec = TextCodec(folder, ())
    assert codec.decode(codec.encode("12 + 3")) == "12 + 3"
    ChatTemplate(folder, None)
    assert not (tmp_path / "ran").exists()
