"""Reads the model description in a Hugging Face checkpoint folder, without torch or transformers.

FAMILIES lists the supported families; each has a file in this folder. The weights are read by `weight_files.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_rl.disk import is_pointer
from moe_rl.errors import About, ConfigError, describe
from moe_rl.models import deepseek_v3, glm4_moe, gpt_oss, qwen3_moe
from moe_rl.models.facts import FOREIGN, LENGTHS, UNWANTED, Fields, ModelFacts, Rope
from moe_rl.models.routed import family_name, find_experts
from moe_rl.models.weight_table import Shape, Weight, ends

FAMILIES = {family.ARCHITECTURE: family for family in (qwen3_moe, glm4_moe, deepseek_v3, gpt_oss)}
DTYPES = ["float32", "bfloat16", "float16"]
MAX_JSON_BYTES = 256 << 20
# Files that hold a tokenizer's vocabulary. Those other than tokenizer.json are read through transformers.
TOKENIZER_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json")


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Holds parameter counts.

    Attributes:
        dense: all parameters outside the experts.
        cut: the part of `dense` that is divided among tensor-parallel ranks. Norms and routers are whole on every rank.
        expert: the parameters of all experts.
    """

    dense: int
    cut: int
    expert: int

    @property
    def total(self) -> int:
        return self.dense + self.expert


def read_model(path: str | Path) -> ModelFacts:
    """Read `config.json` of the checkpoint folder `path`.

    Raises:
        ConfigError: with every problem of the folder.
    """
    folder = _existing(path)
    problems = []
    if not any(next(folder.glob(name), None) for name in TOKENIZER_FILES):
        problems.append(
            describe(
                "the checkpoint has no tokenizer",
                where={"key": "model.path", "folder": folder},
                expected=f"one of {', '.join(TOKENIZER_FILES)}",
            )
        )
    if not any(folder.glob("*.safetensors")):
        problems.append(describe("the checkpoint has no *.safetensors", where={"key": "model.path", "folder": folder}))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            [describe("the checkpoint has no config.json", where={"key": "model.path", "folder": folder}), *problems]
        )
    try:
        facts = _facts(folder / "config.json")
    except ConfigError as error:
        raise ConfigError(error.problems + problems) from None
    if problems:
        raise ConfigError(problems)
    return facts


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint folder, of any family.

    Raises:
        ConfigError: the file is missing, or is not a JSON object.
    """
    return read_json(_existing(folder) / "config.json")


def _existing(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            "there is no such folder", where={"key": "model.path", "folder": folder}, do="give a checkpoint folder"
        )
    return folder


def read_published(file: str | Path) -> ModelFacts:
    """Read the figures of a published config.json.

    Raises:
        ConfigError: with every problem of the file.
    """
    return _facts(Path(file))


def _facts(file: Path) -> ModelFacts:
    return facts_of(read_json(file), file)


def facts_of(raw: dict[str, Any], file: Path) -> ModelFacts:
    """Read the facts in a config.json. file: its path; a generation_config.json in the same folder is read too.

    Raises:
        ConfigError: with every problem of the file.
    """
    where: About = {"file": file}
    architectures = raw.get("architectures")
    architectures = architectures if isinstance(architectures, list) else []
    architecture = next((name for name in architectures if name in FAMILIES), None)
    if architecture is None:
        experts = find_experts(raw)
        raise ConfigError(
            "a dense model has no experts to route to" if experts is None else "this family of models is not trained",
            where={"key": "model.path", **where},
            got=family_name(raw) if experts is None else f"{family_name(raw)}, with {experts}",
            expected=" or ".join(FAMILIES),
            do=""
            if experts is None
            else "its routes can be recorded, imported and checked with a layer map: docs/howto/library.md",
            fault="dense" if experts is None else "",
        )

    read = Fields(raw, where)
    layers = read.count("num_hidden_layers", most=512)
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads, head_dim = read.count("num_key_value_heads"), read.count("head_dim", default=hidden // heads)
    if heads % kv_heads:
        read.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    family = FAMILIES[architecture]
    if len(architectures) > 1:
        read.wrong("architectures", architectures, "one class: vLLM takes the first that it has")
    if raw.get("model_type") not in family.MODEL_TYPES:
        read.wrong("model_type", raw.get("model_type"), f"{' or '.join(family.MODEL_TYPES)}, as of {architecture}")
    for key, value in FOREIGN.items():
        read.only(key, value)
    for key in UNWANTED:
        if key in raw:
            read.wrong(key, raw[key], "no such key")
    positions = read.count("max_position_embeddings")
    for key in LENGTHS:
        if raw.get(key) is not None:
            read.only(key, positions, why="max_position_embeddings has it")
    rope = Rope.of(read, theta=family.ROPE_THETA, fraction=family.ROTARY_FRACTION)
    read.only("hidden_act", "silu")
    top_k, vocab = read.count("num_experts_per_tok"), read.count("vocab_size")
    common = {
        "architecture": architecture,
        "vocab": vocab,
        "hidden_size": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": read.count("intermediate_size"),
        "top_k": top_k,
        "rope_theta": rope.theta,
        "rotary_fraction": rope.fraction,
        "rms_norm_eps": read.fraction("rms_norm_eps"),
        "max_position_embeddings": positions,
        "tie_word_embeddings": read.flag("tie_word_embeddings", False),
        "eos_token_ids": _eos(read, file.parent, vocab),
        "dtype": _dtype(read),
        "fingerprint": fingerprint_of(raw),
    }
    of_family = family.facts(read, layers=layers, top_k=top_k, rope=rope)
    facts = ModelFacts(**(common | of_family))
    if top_k > facts.num_experts:
        read.wrong("num_experts_per_tok", top_k, f"at most num_experts = {facts.num_experts}")
    kinds = ["sliding_attention" if layer in facts.windowed_layers else "full_attention" for layer in range(layers)]
    if raw.get("layer_types") not in (None, kinds):
        expected = "sliding_attention and full_attention in turn" if facts.windowed_layers else "full_attention"
        read.wrong("layer_types", raw["layer_types"], f"{expected}, {layers} in all")
    if facts.rotary_fraction > 1 or facts.latent is None and int(facts.head_dim * facts.rotary_fraction) % 2:
        read.wrong(
            "partial_rotary_factor",
            facts.rotary_fraction,
            f"a value for which an even number of dimensions is rotated, with head_dim = {facts.head_dim} dimensions",
        )
    if read.problems:
        raise ConfigError(read.problems)
    return facts


def _dtype(read: Fields) -> str:
    key, value = next(((key, read.raw[key]) for key in ("dtype", "torch_dtype") if read.raw.get(key) is not None),
                      ("dtype", "float32"))  # fmt: skip
    if value not in DTYPES:
        read.wrong(key, value, " or ".join(DTYPES))
    return str(value)


def _eos(read: Fields, folder: Path, vocab: int) -> tuple[int, ...]:
    generation = folder / "generation_config.json"
    values = [read.raw.get("eos_token_id"), read_json(generation).get("eos_token_id") if generation.is_file() else None]
    flat = [item for value in values for item in (value if isinstance(value, list) else [value]) if item is not None]
    most = vocab - 1 or 2**31  # a wrong vocab_size is told alone
    if any(type(item) is not int or not 0 <= item <= most for item in flat):
        read.wrong("eos_token_id", flat, f"token ids from 0 to {most}, here and in {generation.name}")
        return ()
    return tuple(dict.fromkeys(flat))


def fingerprint_of(raw: dict[str, Any]) -> str:
    """Return the hex sha256 of a config.json, as in ModelFacts."""
    kept = {key: value for key, value in raw.items() if key not in ("transformers_version", "_name_or_path")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def layer_weights(facts: ModelFacts, layer: int) -> tuple[Weight, ...]:
    """Return the weights of the layer with this 0-based number, from the tables of its family."""
    return FAMILIES[facts.architecture].layer_weights(facts, has_experts=layer in facts.moe_layers)


def _stage_weights(
    facts: ModelFacts, layers: Iterable[int], *, first: bool, last: bool
) -> Iterator[tuple[str, Weight]]:
    """Yield (prefix of the tensor names, weight) for some layers, and for the ends of the model."""
    front, back = ends(facts, first=first, last=last)
    yield from (("", weight) for weight in front)
    for layer in layers:
        yield from ((f"model.layers.{layer}.", weight) for weight in layer_weights(facts, layer))
    yield from (("", weight) for weight in back)


def _tensors(facts: ModelFacts, prefix: str, weight: Weight) -> Iterator[tuple[str, Shape]]:
    for name, shape in weight.tensors.items():
        if weight.experts == "each":
            yield from ((prefix + name.format(expert=expert), shape) for expert in range(facts.num_experts))
        else:
            yield prefix + name, shape


def expected_tensors(facts: ModelFacts) -> dict[str, Shape]:
    """Return the shapes of all tensors of the decoder, by their names in the published checkpoints."""
    weights = _stage_weights(facts, range(facts.layers), first=True, last=True)
    return dict(tensor for prefix, weight in weights for tensor in _tensors(facts, prefix, weight))


def is_mtp_tensor(facts: ModelFacts, name: str) -> bool:
    """Return whether `name` belongs to a multi-token-prediction layer. Checkpoints number these layers after the
    decoder's.
    """
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and facts.layers <= int(match[1]) < facts.layers + facts.mtp_layers


def parameter_count(facts: ModelFacts) -> ParameterCount:
    """Return the number of parameters in the tensors of `expected_tensors`."""
    return stage_parameter_counts(facts, [range(facts.layers)])[0]


def stage_parameter_counts(facts: ModelFacts, stages: Sequence[Sequence[int]]) -> list[ParameterCount]:
    """Count the parameters of each pipeline stage, given its layers.

    The first stage also has the embedding, and the last stage the output matrix, or a copy of a tied embedding.
    """
    last = len(stages) - 1
    return [
        _count(facts, _stage_weights(facts, layers, first=stage == 0, last=stage == last))
        for stage, layers in enumerate(stages)
    ]


def _count(facts: ModelFacts, weights: Iterable[tuple[str, Weight]]) -> ParameterCount:
    dense = cut = expert = 0
    for _, weight in weights:
        size = sum(math.prod(shape) for shape in weight.tensors.values())
        if weight.experts:
            expert += size * (facts.num_experts if weight.experts == "each" else 1)
            continue
        dense += size
        cut += 0 if weight.axis is None else size
    return ParameterCount(dense, cut, expert)


def tokenizer_vocabulary(path: str | Path) -> int:
    """Return the largest token id that tokenizer.json of the folder `path` can give, plus 1.

    Raises:
        ConfigError: the file cannot be read or has no vocabulary.
    """
    file = Path(path) / "tokenizer.json"
    raw = read_json(file)
    try:
        vocab = raw["model"]["vocab"]
        largest = max(vocab.values(), default=-1) if isinstance(vocab, dict) else len(vocab) - 1
        return 1 + max([largest, *(token["id"] for token in raw.get("added_tokens") or [])])
    except (KeyError, TypeError) as error:
        raise ConfigError(
            "tokenizer.json holds no vocabulary", where={"key": "model.path", "file": file}, got=f"{error!r}"
        ) from None


def read_json(file: Path) -> dict[str, Any]:
    """Read a small JSON file with a mapping. Raises ConfigError."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(
                "file too large", where={"key": "model.path", "file": file}, expected=f"<= {MAX_JSON_BYTES} bytes"
            )
        value = json.loads(file.read_text(encoding="utf-8"))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError("cannot read a file", where={"key": "model.path", "file": file}, got=error.strerror) from None
    except (ValueError, RecursionError) as error:
        got, do = (
            ("a pointer of Git LFS", "fetch the files themselves: git lfs pull") if is_pointer(file) else (error, "")
        )
        raise ConfigError("not valid JSON", where={"key": "model.path", "file": file}, got=got, do=do) from None
    if not isinstance(value, dict):
        raise ConfigError("not a mapping", where={"key": "model.path", "file": file}, got=type(value).__name__)
    return value
