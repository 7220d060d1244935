"""Makes a tokenizer.json from a tokenizer that is Python code around a tiktoken vocabulary, such as Moonlight's.

The code runs here once, and only if the caller names the digest of its files. Nothing else in moe_rl runs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_rl.disk import write_json
from moe_rl.errors import About, ConfigError, DataError

_WEIGHTS = ".safetensors"
_TEXTS = (
    "The quick brown fox doesn't jump; it's 12,345.67 \u20ac -- isn't IT?",
    "  two  spaces,\ta tab\n\n a new line \r\n\r\n and an end   ",
    "\u4e2d\u6587\u548c English \u6df7\u5408123\u3002\u65e5\u672c\u8a9e\u306e\u6587\u3001\ud55c\uad6d\uc5b4",
    "def f(x: int) -> str:\n    return f'{x:>08b}' + \"\\n\"  # 0xFF",
    "na\u00efve cafe\u0301 \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u00bd \u2167 \u0660\u0661\u0662\u0663",
    "x^{2}+\\frac{1}{2}=\\boxed{42}",
)
_RANDOM_TEXTS = 200


def convert_tokenizer(source: Path, out: Path, digest: str | None) -> str:
    """Write the tokenizer of the checkpoint folder `source` into a new folder, without code. Return what was done.

    Args:
        digest: the digest of the files of its code. Without it, the error gives the value and names the files.

    Raises:
        ConfigError: `digest` is not that of the files, or `out` exists, or there is no code.
        DataError: the code has no tiktoken vocabulary, or tokenizer.json would give other ids.
    """
    where: About = {"folder": source}
    settings_file = source / "tokenizer_config.json"
    settings = json.loads(settings_file.read_bytes()) if settings_file.is_file() else {}
    named = json.dumps(settings.get("auto_map", ""))
    if not settings.get("auto_map"):
        raise ConfigError("this tokenizer has no code", where=where, do="use the folder as it is")
    if "--" in named:
        do = "copy its files into the folder, and name them in auto_map of tokenizer_config.json"
        raise ConfigError("the code of this tokenizer is in another repository", where=where, got=named, do=do)
    if out.exists():
        raise ConfigError("the tokenizer must be written into a new folder", where={"folder": out})
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "tokenizer"  # so that the digested files are those that run
        copy.mkdir()
        for file in source.iterdir():
            if file.is_file() and _WEIGHTS not in file.name:
                shutil.copy(file, copy)
        code = sorted(copy.glob("*.py"))
        computed = hashlib.sha256(b"".join(file.name.encode() + b"\0" + file.read_bytes() for file in code)).hexdigest()
        if digest != computed:
            raise ConfigError(
                "the tokenizer's code runs with your rights, and you have not allowed these files",
                where=where,
                got=f"--run-code {digest}" if digest else "no --run-code",
                expected=computed,
                do=f"read {', '.join(file.name for file in code)}, then add --run-code {computed}",
            )
        os.environ |= {"HF_MODULES_CACHE": str(Path(temporary) / "modules"), "HF_HUB_OFFLINE": "1"}
        original, tokenizer = _both(copy, where)
        compared = _compare(original, tokenizer, where)
        out.mkdir(parents=True)
        for name in ("chat_template.jinja", "special_tokens_map.json"):
            if (copy / name).is_file():
                shutil.copy(copy / name, out)
    tokenizer.save(str(out / "tokenizer.json"))
    kept = {key: value for key, value in settings.items() if key != "auto_map"}
    write_json(out / "tokenizer_config.json", kept | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return f"{tokenizer.get_vocab_size()} tokens; {compared} texts have the same ids as with the original's code"


def _both(folder: Path, where: About) -> tuple[Any, Any]:
    """Return the original tokenizer, and one of the library `tokenizers` with the same vocabulary."""
    import tiktoken
    from transformers import AutoTokenizer
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class RanksConverter(TikTokenConverter):
        """Takes ranks that are read already."""

        load_tiktoken_bpe = staticmethod(lambda ranks: ranks)

    original = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=True)
    encodings = [value for value in vars(original).values() if isinstance(value, tiktoken.Encoding)]
    if len(encodings) != 1:
        raise DataError(
            "the tokenizer's code has no tiktoken vocabulary",
            where=where,
            got=f"{type(original).__name__} with {len(encodings)} of them",
            expected="one attribute that is a tiktoken.Encoding",
            do="ask the publisher for a tokenizer.json",
            fault="tokenizer code",
        )
    encoding = encodings[0]
    special = dict(sorted(encoding._special_tokens.items(), key=lambda item: item[1]))
    tokenizer = RanksConverter(
        vocab_file=encoding._mergeable_ranks, pattern=encoding._pat_str, extra_special_tokens=special
    ).converted()
    wrong = {name: number for name, number in special.items() if tokenizer.token_to_id(name) != number}
    if wrong:
        what = "the special tokens do not follow the others, which tokenizer.json needs"
        raise DataError(what, where=where, got=dict(list(wrong.items())[:3]), fault="tokenizer code")
    return original, tokenizer


def _compare(original: Any, tokenizer: Any, where: About) -> int:
    """Return the number of texts on which both agree, in ids and back. Raises DataError if one differs."""
    texts = list(_texts(list(tokenizer.get_added_tokens_decoder().values())))
    for text in texts:
        expected = list(original.encode(text, add_special_tokens=False))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if ids != expected or tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise DataError(
                "tokenizer.json would give other ids than the tokenizer's code",
                where=where,
                got=f"{ids[:20]} for {text[:60]!r}",
                expected=expected[:20],
                do="ask the publisher for a tokenizer.json",
                fault="tokenizer code",
            )
    return len(texts)


def _texts(special: list[Any]) -> Iterator[str]:
    """Yield texts of many scripts, every special token within a text, and random characters of every category."""
    yield from _TEXTS
    yield from (f"a{token.content} b" for token in special)
    chance = random.Random(1)
    pool = [chr(code) for code in range(1, 0x2FFFF) if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")]
    for _ in range(_RANDOM_TEXTS):
        near = [chr(chance.randrange(32, 127)) for _ in range(40)]
        yield "".join(chance.choices(pool + near * 2000, k=60))
