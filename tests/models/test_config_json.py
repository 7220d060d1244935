"""Compares what we read from config.json with what the config classes of transformers make of it, for every family and
key: absent, null, of another value or type, and said twice. vLLM reads the file through these classes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from moe_rl.cli import main
from moe_rl.errors import ConfigError
from moe_rl.models import second_reading
from moe_rl.models.facts import FOREIGN, LENGTHS, UNWANTED, LatentAttentionSizes, Yarn
from moe_rl.models.hf import FAMILIES, read_published
from tests.config.conftest import DEEPSEEK_CONFIG, GLM_CONFIG, GPT_OSS_CONFIG, HF_CONFIG
from tests.support.refusals import refused

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
BASES = {
    "qwen": HF_CONFIG,
    "glm": GLM_CONFIG,
    "deepseek": {key: value for key, value in DEEPSEEK_CONFIG.items() if value is not None},
    "gpt-oss": {key: value for key, value in GPT_OSS_CONFIG.items() if value is not None},
} | {name.stem: json.loads(name.read_text()) for name in MODELS.glob("*.json")}
BASES["moonlight"] = BASES["deepseek"] | {"q_lora_rank": None, "rope_scaling": None, "num_key_value_heads": 4}
# As transformers 5 saves them: rope_parameters alone.
for _name in ("qwen", "glm", "deepseek", "gpt-oss"):
    _raw = dict(BASES[_name])
    _rope = {"rope_theta": _raw.pop("rope_theta")} | (_raw.pop("rope_scaling", None) or {"rope_type": "default"})
    _rope["rope_type"] = _rope.pop("type", None) or _rope["rope_type"]
    BASES[f"{_name}-new"] = _raw | {"rope_parameters": _rope}
USUAL = ("qwen", "glm-new", "deepseek", "gpt-oss-new")
ROPES = ("rope_scaling", "rope_parameters")
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1}
# Keys that a family's file may lack, with a value that is not its default.
ADDED = {
    "rope_theta": 7.0, "rope_scaling": YARN, "rope_parameters": YARN, "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 77, "head_dim": 6, "num_experts": 6, "num_local_experts": 6,
    "n_routed_experts": 6, "num_key_value_heads": 1, "norm_topk_prob": False, "routed_scaling_factor": 3.5,
    "n_group": 2, "topk_group": 2, "first_k_dense_replace": 2, "n_shared_experts": 3, "moe_layer_freq": 2,
    "mlp_only_layers": [2], "decoder_sparse_step": 2, "num_nextn_predict_layers": 2, "num_mtp_layers": 2,
    "attention_bias": True, "use_qk_norm": True, "tie_word_embeddings": True, "sliding_window": 5,
    "use_sliding_window": True, "layer_types": ["full_attention"] * 3, "swiglu_limit": 5.0, "swiglu_alpha": 1.5,
    "hidden_act": "gelu", "rope_interleave": False, "dtype": "float16", "torch_dtype": "float16",
    "rms_norm_eps": 1e-3, "eos_token_id": 3, "model_type": "llama", "text_config": {"num_experts": 6},
    "per_layer_config": {"0": {"intermediate_size": 6}}, "moe_intermediate_size": 5, "max_position_embeddings": 50,
    "shared_expert_intermediate_size": 4, "rotary_pct": 0.5,
}  # fmt: skip
IN_ROPE = ADDED.keys() & {"partial_rotary_factor", "original_max_position_embeddings", "rope_theta"} | {
    "rope_type", "type", "factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim",
    "attention_factor", "mrope_section",
}  # fmt: skip
# What a key decides about others, by whose name the file may then be refused.
FOLLOW = {
    "hidden_size": ["head_dim"],
    "num_attention_heads": ["num_key_value_heads"],
    "num_hidden_layers": ["layer_types", "mlp_only_layers", "first_k_dense_replace"],
    "decoder_sparse_step": ["mlp_only_layers"],
    "num_experts_per_tok": ["norm_topk_prob"],
    "n_routed_experts": ["n_group", "topk_group"],
    "n_group": ["topk_group"],
    "head_dim": ["partial_rotary_factor"],
    "qk_nope_head_dim": ["v_head_dim"],
    "qk_rope_head_dim": ["head_dim", "v_head_dim"],
}


def changed(raw: dict, *, every: bool):
    """Yield (the key, a name, the file) for each file with one key changed. every: also to values of other types."""
    odd = {"text": "x", "zero": 0, "one": 1, "float": 1.5, "true": True, "empty": {}} if every else {}
    for key in sorted((raw.keys() | ADDED.keys()) - {"architectures"}):
        values = {"null": None, **odd}
        if key in ADDED:
            values |= {"other": ADDED[key]}
        if key in raw:
            yield key, "absent", {name: value for name, value in raw.items() if name != key}
        for name, value in values.items():
            yield key, name, raw | {key: value}
    for where in ROPES:
        rope = raw.get(where) or {}
        for key in sorted(IN_ROPE):
            values = {"null": None, "two": 2.0, "false": False, "yarn": "yarn", **odd}
            values |= {"default": "default", "linear": "linear"} if "type" in key else {}
            if key in rope:
                yield (
                    key,
                    f"{where} absent",
                    raw | {where: {name: value for name, value in rope.items() if name != key}},
                )
            for name, value in values.items():
                yield key, f"{where} {name}", raw | {where: rope | {key: value}}
        for other in ({"rope_type": "default"}, {"rope_type": "default", "rope_theta": 123.0}, YARN, rope):
            for first in (rope, {"rope_type": "default"}, YARN):
                yield where, f"both, {other}", raw | {where: first, ROPES[1 - ROPES.index(where)]: other}


class Unusable(Exception):
    """transformers refuses the file, or its model could not be built."""


def _is(kind, value):
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise Unusable(value)
    return value


def theirs(raw: dict, read=None) -> dict:
    """Return the fields of ModelFacts by the attributes that the modelling code of transformers asks for.

    read(raw) returns the config object, by default that of transformers. Raises Unusable.
    """
    import transformers

    family = FAMILIES[raw["architectures"][0]].MODEL_TYPES[0]
    try:
        if raw.get("model_type") != family:
            raise Unusable(raw.get("model_type"))
        config = (read or transformers.CONFIG_MAPPING[family].from_dict)(copy.deepcopy(raw))
        return _facts(config, family)
    except Unusable:
        raise
    except Exception as error:
        raise Unusable(error) from error


def _facts(config, family: str) -> dict:
    number = lambda name: _is(int, getattr(config, name))  # noqa: E731
    rope, layers, width = config.rope_parameters, number("num_hidden_layers"), number("hidden_size")
    facts = {
        "vocab": number("vocab_size"), "hidden_size": width, "layers": layers,
        "heads": number("num_attention_heads"), "kv_heads": number("num_key_value_heads"),
        "head_dim": _is(int, getattr(config, "head_dim", width // number("num_attention_heads"))),
        "attention_bias": _is(bool, config.attention_bias), "intermediate_size": number("intermediate_size"),
        "top_k": number("num_experts_per_tok"), "num_experts": number("num_local_experts"),
        "rms_norm_eps": _is(float, config.rms_norm_eps), "max_position_embeddings": number("max_position_embeddings"),
        "tie_word_embeddings": _is(bool, config.tie_word_embeddings), "rope_theta": _is(float, rope["rope_theta"]),
        "rotary_fraction": _is(float, rope.get("partial_rotary_factor", 1.0)), "yarn": None, "qk_norm": False,
    }  # fmt: skip
    if family == "glm4_moe" and rope["rope_type"] != "default":
        raise Unusable("no such angles here")
    if rope["rope_type"] == "yarn":
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        facts["yarn"] = Yarn(
            _is(float, rope["factor"]), _is(int, rope["original_max_position_embeddings"]),
            rope.get("beta_fast") or 32, rope.get("beta_slow") or 1, bool(rope.get("truncate", True)),
            *(scales if all(scales) else (None, None)),
        )  # fmt: skip
        if rope.get("attention_factor") is not None:
            raise Unusable("a factor of its own")
    elif rope["rope_type"] != "default":
        raise Unusable(rope["rope_type"])
    if family == "qwen3_moe":
        sparse = [at for at in range(layers) if at not in config.mlp_only_layers]
        return facts | {
            "qk_norm": True, "norm_topk_prob": _is(bool, config.norm_topk_prob),
            "moe_layers": tuple(at for at in sparse if (at + 1) % config.decoder_sparse_step == 0),
            "moe_intermediate_size": number("moe_intermediate_size"), "window": config.sliding_window or 0,
        }  # fmt: skip
    if family == "gpt_oss":
        windowed = tuple(at for at, kind in enumerate(config.layer_types) if kind == "sliding_attention")
        return facts | {
            "moe_layers": tuple(range(layers)), "moe_intermediate_size": facts["intermediate_size"],
            "window": number("sliding_window") if windowed else 0, "windowed_layers": windowed,
            "glu_clamp": _is(float, config.swiglu_limit),
        }  # fmt: skip
    groups, top_groups = number("n_group"), number("topk_group")
    facts |= {
        "moe_layers": tuple(range(number("first_k_dense_replace"), layers)),
        "moe_intermediate_size": number("moe_intermediate_size"),
        "shared_intermediate_size": number("moe_intermediate_size") * number("n_shared_experts"),
        "norm_topk_prob": _is(bool, config.norm_topk_prob),
        "routed_scaling": _is(float, config.routed_scaling_factor),
        "groups": groups if top_groups != groups else 1, "top_groups": top_groups if top_groups != groups else 1,
        "mtp_layers": number("num_nextn_predict_layers"),
    }  # fmt: skip
    if family == "glm4_moe":
        return facts | {"qk_norm": _is(bool, config.use_qk_norm)}
    sizes = LatentAttentionSizes(
        0 if config.q_lora_rank is None else number("q_lora_rank"), number("kv_lora_rank"),
        number("qk_nope_head_dim"), number("qk_rope_head_dim"), number("v_head_dim"),
    )  # fmt: skip
    if number("head_dim") != sizes.rope_dim or not config.rope_interleave:
        raise Unusable("rotates other dimensions")
    return facts | {"latent": sizes, "kv_heads": facts["heads"], "head_dim": sizes.nope_dim + sizes.rope_dim}


def ours(raw: dict, folder: Path):
    file = folder / "config.json"
    file.write_text(json.dumps(raw))
    return read_published(file)


def disagreement(key: str, name: str, raw: dict, folder: Path, read=None) -> str:
    """Return what is wrong with our reading of a file in which this key was changed; "" if nothing is."""
    try:
        found = dataclasses.asdict(ours(raw, folder))
    except ConfigError as error:
        names = (key, *FOLLOW.get(key, ()), *(ROPES if key in ROPES or name.startswith(ROPES) else ()))
        fields = [str(problem.about.get("field")) for problem in error.problems]
        named = any(one in field for one in names for field in fields)
        return "" if named else f"refused without its name: {error}"
    try:
        wanted = theirs(raw, read)
    except Unusable as error:
        return f"accepted, and transformers cannot: {error}"
    wanted = {name: dataclasses.asdict(one) if dataclasses.is_dataclass(one) else one for name, one in wanted.items()}
    return "; ".join(f"{name} {found[name]} is {one} there" for name, one in wanted.items() if found[name] != one)


@pytest.mark.parametrize(
    ("base", "every"),
    [(base, False) for base in USUAL] + [pytest.param(base, True, marks=pytest.mark.long) for base in sorted(BASES)],
)
def test_every_key_is_read_as_transformers_does_or_refused_by_name(base, every, tmp_path):
    raw = BASES[base]
    assert disagreement("", "", raw, tmp_path) == "" and ours(raw, tmp_path)
    wrong = [f"{key} {name}: {found}" for key, name, file in changed(raw, every=every)
             if (found := disagreement(key, name, file, tmp_path))]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def without(raw: dict, *keys: str) -> dict:
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize(
    ("raw", "other"),
    [
        (HF_CONFIG, HF_CONFIG | {"num_local_experts": 4}),
        (HF_CONFIG, without(HF_CONFIG, "num_experts") | {"num_local_experts": 4}),
        (HF_CONFIG, HF_CONFIG | {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": None}),
        (HF_CONFIG, HF_CONFIG | {"rope_parameters": {}, "rope_scaling": {"type": "default", "rope_theta": 1e6}}),
        (HF_CONFIG, HF_CONFIG | {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "default"}}),
        (HF_CONFIG, without(HF_CONFIG, "mlp_only_layers", "decoder_sparse_step") | {"mlp_only_layers": [1]}),
        (HF_CONFIG, HF_CONFIG | {"dtype": "float32", "sliding_window": None, "layer_types": ["full_attention"] * 3}),
        (GLM_CONFIG, without(GLM_CONFIG, "partial_rotary_factor", "n_group", "topk_group")),
        (GLM_CONFIG, GLM_CONFIG | {"num_mtp_layers": 0, "num_local_experts": 4}),
        (BASES["deepseek"], BASES["deepseek-new"]),
        (BASES["deepseek"], BASES["deepseek"] | {"rope_parameters": BASES["deepseek-new"]["rope_parameters"]}),
        (BASES["deepseek"], BASES["deepseek"] | {"model_type": "kimi_k2", "head_dim": 2}),
        (BASES["gpt-oss"], without(BASES["gpt-oss-new"], "layer_types", "swiglu_limit")),
    ],
)
def test_other_spellings_of_the_same_model_are_read(raw, other, tmp_path):
    assert dataclasses.replace(ours(other, tmp_path), fingerprint="") == dataclasses.replace(
        ours(raw, tmp_path), fingerprint=""
    )


DEFAULTS = {
    "qwen": ["norm_topk_prob", "decoder_sparse_step", "tie_word_embeddings", "rope_theta"],
    "glm": ["routed_scaling_factor", "first_k_dense_replace", "num_nextn_predict_layers", "use_qk_norm", "rope_theta"],
    "deepseek_v3": ["n_group", "topk_group", "routed_scaling_factor", "n_shared_experts", "num_nextn_predict_layers"],
    "gpt-oss": ["rope_theta", "layer_types", "swiglu_limit"],
}


@pytest.mark.parametrize(("base", "key"), [(base, key) for base, keys in DEFAULTS.items() for key in keys])
def test_an_absent_key_has_the_default_of_transformers(base, key, tmp_path):
    raw = without(BASES[base], key)
    assert disagreement(key, "absent", raw, tmp_path) == "" and ours(raw, tmp_path)


@pytest.mark.parametrize("more", [{"factor": 2.0, "original_max_position_embeddings": 128},
                                  {"factor": 4.0, "original_max_position_embeddings": 32}])  # fmt: skip
def test_two_rope_keys_that_contradict_each_other_are_refused(more, tmp_path):
    for base in USUAL:
        scaled = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0} | more
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        raw = without(BASES[base], "rope_theta", "rope_scaling") | {"rope_parameters": plain, "rope_scaling": scaled}
        with refused(ConfigError, key="model.path", field="rope_parameters and rope_scaling"):
            ours(raw, tmp_path)


@pytest.mark.parametrize("base", USUAL)
def test_keys_of_other_families_that_software_reads_in_any_file_are_refused(base, tmp_path):
    """transformers masks nothing where `is_causal` is false or null. vLLM reads the others."""
    for key, harmless in FOREIGN.items():
        for value in [{"num_hidden_layers": 1}, 1, *([] if harmless is None else [None, not harmless])]:
            with refused(ConfigError, key="model.path", field=key):
                ours(BASES[base] | {key: value}, tmp_path)
        assert ours(BASES[base] | {key: harmless}, tmp_path)
    for key in UNWANTED:
        with refused(ConfigError, key="model.path", field=key):
            ours(BASES[base] | {key: None}, tmp_path)
    for key in LENGTHS:
        for value in (BASES[base]["max_position_embeddings"] - 1, 1e9, "8"):
            with refused(ConfigError, key="model.path", field=key):
                ours(BASES[base] | {key: value}, tmp_path)
        assert ours(BASES[base] | {key: BASES[base]["max_position_embeddings"]}, tmp_path)
    for classes in (["LlamaForCausalLM", *BASES[base]["architectures"]], BASES[base]["architectures"] * 2):
        with refused(ConfigError, key="model.path", field="architectures"):
            ours(BASES[base] | {"architectures": classes}, tmp_path)


@pytest.mark.parametrize(("positions", "longest"), [(64, 64), (256, 256), (1000, 256)])
def test_a_model_with_yarn_is_as_long_as_vllm_serves_it(positions, longest, tmp_path):
    """It refuses more than max_position_embeddings, and has no angles beyond factor x positions."""
    raw = BASES["qwen"] | {"rope_scaling": YARN, "max_position_embeddings": positions}
    assert ours(raw, tmp_path).longest == longest


def test_the_second_reading_is_that_of_transformers():
    """In a process of its own, without torch."""
    import transformers

    raw = BASES["glm"]
    told = second_reading.as_transformers(json.dumps(raw), "glm4_moe")
    whole = transformers.Glm4MoeConfig.from_dict(dict(raw)).to_dict()
    assert told == json.loads(json.dumps(whole)) and told["rope_parameters"]["partial_rotary_factor"] == 0.5
    refusal = second_reading.as_transformers(json.dumps(raw | {"n_group": "x"}), "glm4_moe")
    assert isinstance(refusal, str) and "n_group" in refusal


@pytest.mark.parametrize("base", sorted(BASES))
def test_a_file_written_out_in_full_has_the_same_numbers(base, tmp_path):
    """What the second reading compares has no difference of its own."""
    import transformers

    family = FAMILIES[BASES[base]["architectures"][0]].MODEL_TYPES[0]
    whole = transformers.CONFIG_MAPPING[family].from_dict(copy.deepcopy(BASES[base])).to_dict()
    assert dataclasses.replace(ours(whole, tmp_path), fingerprint="") == dataclasses.replace(
        ours(BASES[base], tmp_path), fingerprint=""
    )


@pytest.mark.parametrize(
    ("other", "field", "pieces"),
    [
        ({"rope_theta": 5e5}, "rope_theta", ("500000.0", "1000000.0")),
        ({"norm_topk_prob": False}, "norm_topk_prob", ("False", "True")),
        ({"num_hidden_layers": 2}, "num_hidden_layers", ("2", "3")),
        ({"rope_scaling": YARN}, "rope_parameters", ("Yarn(factor=2.0", "None")),
    ],
)
def test_a_plan_refuses_a_file_that_transformers_reads_differently(
    other, field, pieces, config_file, monkeypatch, capsys, tmp_path
):
    file = tmp_path / "plan.json"
    monkeypatch.setattr(second_reading, "as_transformers", lambda text, model_type: json.loads(text) | other)
    assert main(["plan", "--config", str(config_file), "--json", str(file)]) == 2
    problems = json.loads(file.read_text())["problems"]
    assert any(field in problem and all(piece in problem for piece in pieces) for problem in problems), problems


@pytest.mark.long
@pytest.mark.parametrize("base", USUAL)
def test_vllm_makes_the_same_of_the_keys_of_rotary_position(base, tmp_path):
    """vLLM completes what the config classes make of them, and refuses more."""
    from vllm.transformers_utils.config import get_config

    def of_vllm(raw: dict):
        (tmp_path / "vllm").mkdir(exist_ok=True)
        (tmp_path / "vllm/config.json").write_text(json.dumps(raw))
        return get_config(str(tmp_path / "vllm"), trust_remote_code=False)

    raw, wrong, read = BASES[base], [], 0
    for key, name, file in changed(raw, every=False):
        if key in ROPES or name.startswith(ROPES) or key in ("rope_theta", "partial_rotary_factor"):
            found = disagreement(key, name, file, tmp_path, of_vllm)
            wrong += [f"{key} {name}: {found}"] if found else []
            read += not found
    assert not wrong and read > 20, "\n".join(wrong)
