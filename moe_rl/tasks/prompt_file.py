"""Keeps the prompts of a large file beside it, so that its rows are rendered and tokenised once.

    FILE.SOURCE.prompts    records | where each begins, and where the last ends [prompts + 1] int64 | notes | foot

A record is the number of token ids (uint32), the ids (int32) and the rest of the prompt as JSON. The notes, also JSON,
hold what the reader said of the rows, and a digest of all that the prompts depend on. A file with another digest is
made anew. The foot has the number of prompts, the length of the notes, a checksum of all before, and a mark.

All processes of a host that read the same prompts share the memory of this file.
"""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import secrets
import struct
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
import xxhash

from moe_rl.config.prompt_sources import PromptSourceConfig
from moe_rl.config.schema import Config
from moe_rl.disk import writing
from moe_rl.errors import DiskError, describe
from moe_rl.types import Prompt

SMALLEST_BYTES = 16 << 20
"""Size from which a source's prompts are kept beside it."""
_FOOT, _MARK = struct.Struct("<QQ16s8s"), b"MOERLPR1"
_COUNT = struct.Struct("<I")
_BLOCK = 1 << 20
_TOKENIZERS = {".json", ".jinja", ".model", ".tiktoken", ".txt", ".py"}


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Names the file that keeps the prompts of one source. digest: of all that they depend on."""

    path: Path
    digest: str

    @classmethod
    def of(cls, source: PromptSourceConfig, config: Config) -> Self | None:
        """Return the file of a source; None if the source is not a large file."""
        data = Path(source.data)
        if source.kind not in ("jsonl", "parquet") or not data.is_file() or data.stat().st_size < SMALLEST_BYTES:
            return None
        hasher = xxhash.xxh3_128()
        settings = source.model_dump(mode="json", exclude={"data", "weight", "prompts"})
        chat = None if config.task.chat is None else config.task.chat.model_dump(mode="json")
        limits = [config.rollout.max_prompt_tokens, config.task.environment is not None, str(config.run.date)]
        hasher.update(json.dumps([settings, chat, limits, importlib.metadata.version("transformers")]).encode())
        code = sorted(Path(__file__).parent.glob("*.py"))
        tokenizer = sorted(file for file in config.model.path.iterdir() if file.suffix in _TOKENIZERS)
        for file in (*code, *tokenizer, data):
            hasher.update(_digest(file))
        return cls(data.with_name(f"{data.name}.{source.name}.prompts"), hasher.hexdigest())

    def read(self) -> tuple[PromptTable, dict[str, Any]] | None:
        """Return the prompts and the notes; None if there is no file, or one with another digest or damage."""
        try:
            table = PromptTable(self.path)
        except (OSError, ValueError):
            return None
        return (table, table.notes) if table.notes.pop("digest", None) == self.digest else None


class PromptTable(Sequence[Prompt]):
    """Holds the prompts of a PromptFile. Each is decoded when it is asked for.

    Attributes:
        notes: what was written beside them.
    """

    def __init__(self, path: Path):
        """Map a file. Raises OSError, or ValueError if it is not whole."""
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._data) < _FOOT.size:
            raise ValueError("too short")
        end = len(self._data) - _FOOT.size
        count, length, checksum, mark = _FOOT.unpack_from(self._data, end)
        if mark != _MARK or checksum != _digest(path, end):
            raise ValueError("damaged")
        self.notes: dict[str, Any] = json.loads(self._data[end - length : end])
        self._begins = np.frombuffer(self._data, "<i8", count + 1, end - length - 8 * (count + 1))

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        begin, end = self._begins[index : index + 2].tolist()
        (tokens,) = _COUNT.unpack_from(self._data, begin)
        token_ids = struct.unpack_from(f"<{tokens}i", self._data, begin + _COUNT.size)
        name, text, columns, messages, level = json.loads(self._data[begin + _COUNT.size + 4 * tokens : end])
        return Prompt(name, text, token_ids, columns, None if messages is None else tuple(messages), level)


class PromptWriter:
    """Writes the prompts of a source while they are made. `finish` publishes them; `close` removes what it did not."""

    def __init__(self, kept: PromptFile):
        """Begin the file. Raises DiskError."""
        self._kept = kept
        self._unfinished = kept.path.with_name(f"{kept.path.name}.{secrets.token_hex(8)}.tmp")
        self._begins, self._end, self._hasher = array("q", [0]), 0, xxhash.xxh3_128()
        with writing("the prompts could not be kept", kept.path):
            self._file = self._unfinished.open("wb", buffering=_BLOCK)

    def append(self, prompt: Prompt) -> None:
        """Write one prompt. Raises DiskError."""
        rest = [prompt.id, prompt.text, prompt.columns, prompt.messages, prompt.level]
        tokens = prompt.token_ids
        self._write(struct.pack(f"<I{len(tokens)}i", len(tokens), *tokens) + json.dumps(rest).encode())
        self._begins.append(self._end)

    def finish(self, notes: Mapping[str, Any]) -> PromptTable:
        """Publish the file. Raises DiskError, also if it cannot be read back whole."""
        text = json.dumps({"digest": self._kept.digest, **notes}).encode()
        self._write(np.asarray(self._begins, "<i8").tobytes() + text)
        with writing("the prompts could not be kept", self._kept.path):
            self._file.write(_FOOT.pack(len(self._begins) - 1, len(text), self._hasher.digest(), _MARK))
            self._file.close()
            self._unfinished.replace(self._kept.path)
        if (kept := self._kept.read()) is None:
            what = "the prompts were kept, but cannot be read back"
            raise DiskError(describe(what, where={"file": self._kept.path}, fault="damaged"))
        return kept[0]

    def close(self) -> None:
        """Remove what was written and not published. May be called repeatedly."""
        with suppress(OSError):  # of what is still buffered, which nobody needs
            self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self._hasher.update(data)
        with writing("the prompts could not be kept", self._kept.path):
            self._file.write(data)
        self._end += len(data)


def _digest(path: Path, length: int | None = None) -> bytes:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        left = path.stat().st_size if length is None else length
        while left and (block := file.read(min(_BLOCK, left))):
            hasher.update(block)
            left -= len(block)
    return hasher.digest()
