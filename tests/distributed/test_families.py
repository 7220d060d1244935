"""Every model family against `transformers` with the same routes, in every kind of layout, many in a process group."""

import functools
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.models.hf import read_model
from moe_rl.proof.batch import LENGTHS, batch
from moe_rl.proof.matrix import largest, merged
from moe_rl.proof.reference import reference as transformers
from tests.distributed.jobs import family
from tests.distributed.ranks import ROOT
from tests.distributed.usual import with_seeds
from tests.support.families import MODELS, recorded_load, write_checkpoint
from tests.support.independent import clear_checkpoint

RATE, AUX = 0.01, 0.5
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
BFLOAT16 = ("glm-groups", "deepseek", "gpt-oss")
USUAL = ["glm-groups TP2-EP2-uniform", "gpt-oss CP2-EP2-moe", "qwen-mixed TP2-EP2-uniform-aux", "qwen-tied PP2-uniform"]
WITH_BIAS = ("glm", "deepseek", "moonlight")
LAYOUTS = {
    "EP2-overlapped": {"parallel": {"expert": 2}, "train": {"overlap_expert_parallel_comm": True}},
    "TP2-EP2-overlapped": {
        "parallel": {"tensor": 2, "expert": 2},
        "train": {"overlap_expert_parallel_comm": True},
    },
    "CP2-EP2-moe": {"parallel": {"context": 2, "expert": 2}, "train": {"recompute": "moe"}},
    "TP2-EP2-uniform": {"parallel": {"tensor": 2, "expert": 2}, "train": {"recompute": "uniform"}},
    "PP2-VPP2-uniform": {
        "parallel": {"pipeline": 2, "virtual_pipeline": 2},
        "train": {"recompute": "uniform"},
    },
    "PP2-uniform": {"parallel": {"pipeline": 2}, "train": {"recompute": "uniform"}},
    # five layers: of the stages one has three of them, and its first run two
    "PP2-VPP2-uneven-uniform": {
        "parallel": {"pipeline": 2, "virtual_pipeline": 2, "layers_per_run": [2, 1, 1, 1]},
        "train": {"recompute": "uniform"},
    },
    "TP2-ETP2": {"parallel": {"tensor": 2, "expert_tensor": 2}, "train": {}},
}
# What a layout does to any model is proven in test_proof.py; here stands what it does to the parts of one family: dense
# layers and shared experts, biases and sinks, latent attention.
LAID_OUT = {
    "qwen-mixed": ("PP2-VPP2-uniform",),
    "glm-groups": ("TP2-EP2-uniform",),
    "moonlight": ("TP2-ETP2",),
    "gpt-oss": ("CP2-EP2-moe", "TP2-EP2-uniform", "PP2-VPP2-uniform"),
    "deepseek": ("TP2-EP2-overlapped", "CP2-EP2-moe", "PP2-VPP2-uneven-uniform"),
    # the first and the last stage each have the embedding
    "qwen-tied": ("PP2-uniform", "TP2-EP2-uniform"),
    "glm-tied": ("PP2-VPP2-uniform",),
    "gpt-tied": ("PP2-VPP2-uniform",),
}
# {ranks: {case: what it asks of the worker}}; the model comes first in a case's name
CASES = {
    1: {f"{name} replay": {"parallel": {}} for name in MODELS if name not in LAID_OUT}
    | {f"{name} native": {"parallel": {}, "mode": "native"} for name in MODELS}
    | {f"{name} bfloat16": {"parallel": {}, "train": {"dtype": "bfloat16"}} for name in BFLOAT16},
    2: {
        f"{name} {layout}-aux": settings | {"train": settings["train"] | {"router_aux_loss": AUX}}
        for name, layout in (
            ("qwen-mixed", "TP2-EP2-uniform"),
            ("glm-groups", "EP2-overlapped"),
            ("glm-groups", "CP2-EP2-moe"),
            ("glm-groups", "PP2-VPP2-uniform"),
        )
        for settings in [LAYOUTS[layout]]
    }
    | {f"{name} {layout}": LAYOUTS[layout] for name, layouts in LAID_OUT.items() for layout in layouts}
    # shared experts are computed while rows travel
    | {"glm-groups TP2-EP2-uniform 1-chunk": LAYOUTS["TP2-EP2-uniform"] | {"overlap_chunks": 1}}
    | {"glm-groups CP2-EP2-moe 3-chunks": LAYOUTS["CP2-EP2-moe"] | {"overlap_chunks": 3}},
}
REPLAYED = [(ranks, case) for ranks, cases in CASES.items() for case in cases if "native" not in case]
EXACT = [one for one in REPLAYED if "bfloat16" not in one[1] and "aux" not in one[1]]
OVERLAPPED = [one for one in EXACT if one[1].endswith("1-chunk")]
BALANCED = [one for one in REPLAYED if "aux" in one[1]]
BIASED = [one for one in EXACT if one[1].startswith(WITH_BIAS)]
RESUMED = [one for one in EXACT if one[1].endswith("uniform") and not one[1].startswith("qwen-mixed")]
WRITTEN = [(ranks, case) for ranks, case in EXACT if "TP2" in case]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, seed):
    """checkpoints(name) -> the folder of a model of MODELS."""

    @functools.cache
    def made(name):
        return clear_checkpoint(lambda n: write_checkpoint(name, tmp_path_factory.mktemp(name), n), seed)

    return made


@pytest.fixture(scope="session")
def seen(checkpoints, on_ranks, tmp_path_factory):
    """seen(number of ranks, case) -> [what each rank saw], and with `written` the checkpoint folder that they wrote."""
    out = tmp_path_factory.mktemp("families")

    @functools.cache
    def run(number, name):
        model, settings = name.split()[0], CASES[number][name]
        biased = model.startswith(WITH_BIAS) and settings.get("mode") != "native"
        case = settings | {
            "checkpoint": str(checkpoints(model)),
            "train": settings.get("train", {}) | ({"expert_bias_rate": RATE} if biased else {}),
            "resume": str(out / f"{name} saved") if (number, name) in RESUMED else "",
            "write": str(out / f"{name} written") if (number, name) in WRITTEN else "",
        }
        return on_ranks(number, family.run, case)

    def result(number, name, written=False):
        found = run(number, name)
        return out / f"{name} written" if written else found

    return result


@pytest.fixture(scope="session")
def reference(checkpoints):
    cache = {}

    def compute(case, forced):
        key = case.split()[0], forced
        if key not in cache:
            _, routes = batch(read_model(checkpoints(key[0])))
            cache[key] = transformers(checkpoints(key[0]), routes if forced else None)
        return cache[key]

    return compute


@pytest.mark.parametrize("ranks, case", [with_seeds(*one, usual=one[1] in USUAL) for one in EXACT])
def test_replay_equals_transformers_with_the_same_routes(seen, reference, ranks, case):
    ours = seen(ranks, case)
    forced, free = reference(case, forced=True), reference(case, forced=False)
    logprobs, gradients = forced.logprobs, forced.gradients
    assert largest(merged(ours, "logprobs"), logprobs) < 2e-6
    assert largest(merged(ours, "grads"), gradients) < 1e-6
    # the check can fail: freely routed, the same model is far away
    assert largest(logprobs, free.logprobs) > 1e-2 and largest(gradients, free.gradients) > 1e-2
    routers = [gradient for name, gradient in gradients.items() if name.endswith(ROUTERS)]
    assert routers and all(gradient.abs().max() > 1e-4 for gradient in routers), "no gradient reaches a router"


@pytest.mark.parametrize("ranks, case", OVERLAPPED)
def test_shared_experts_under_an_exchange_change_no_bit(seen, ranks, case):
    for one, plain in zip(seen(ranks, case), seen(ranks, case.removesuffix(" 1-chunk")), strict=True):
        for key in ("logprobs", "grads", "updated"):
            assert one[key].keys() == plain[key].keys()
            assert all(torch.equal(one[key][name], plain[key][name]) for name in plain[key])
    assert any("shared_experts" in name for one in seen(ranks, case) for name in one["grads"])


@pytest.mark.parametrize("ranks, case", [with_seeds(*one, usual=one[1] in USUAL) for one in BALANCED])
def test_the_auxiliary_loss_is_of_the_live_choice(seen, reference, checkpoints, ranks, case):
    """Added to the objective under replay: microbatches weigh as their real tokens, whoever shares them."""
    ours = seen(ranks, case)
    microbatches = {tuple(numbers) for rank in ours for numbers in rank["microbatches"] if numbers}
    assert sorted(number for numbers in microbatches for number in numbers) == list(range(len(LENGTHS)))
    folder = checkpoints(case.split()[0])
    balanced = transformers(folder, batch(read_model(folder))[1], aux=AUX, microbatches=microbatches)
    gradients = balanced.gradients
    assert largest(merged(ours, "grads"), gradients) < 1e-6
    assert [rank["aux_loss"] for rank in ours] == pytest.approx([balanced.imbalance] * ranks, rel=1e-6)
    without = reference(case, forced=True).gradients
    routers = [name for name in gradients if name.endswith("mlp.gate.weight")]
    assert all((gradients[name] - without[name]).abs().max() > 1e-3 for name in routers)


@pytest.mark.parametrize("case", [with_seeds(case, usual="tied" not in case) for case in CASES[1] if "native" in case])
def test_native_routing_equals_transformers(seen, reference, case):
    """Bias, groups, normalisation and scaling come in the same order, so that the shadow choice is the real one."""
    (ours,) = seen(1, case)
    free = reference(case, forced=False)
    assert largest(ours["logprobs"], free.logprobs) < 2e-6
    assert largest(ours["grads"], free.gradients) < 1e-6
    # with rate 0 the expert bias is what was loaded
    biases = [name for name in ours["loaded"] if name.endswith("e_score_correction_bias")]
    assert len(biases) == len(ours["layers"]) * case.startswith(WITH_BIAS)
    assert all(torch.equal(ours["loaded"][name], ours["updated"][name]) for name in biases)


@pytest.mark.parametrize("ranks, case", REPLAYED)
def test_a_checkpoint_goes_in_and_out_bit_for_bit(seen, checkpoints, ranks, case):
    original = load_file(checkpoints(case.split()[0]) / "model.safetensors")
    loaded = merged(seen(ranks, case), "loaded")
    assert loaded.keys() == original.keys()
    for name, tensor in original.items():
        if "bfloat16" in case and not name.endswith("e_score_correction_bias"):
            tensor = tensor.bfloat16().float()
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("ranks, case", [(ranks, case) for ranks, cases in CASES.items() for case in cases])
def test_what_is_exported_is_held_against_the_ranks_own_parameters(seen, checkpoints, ranks, case):
    """At the start with the checkpoint, after an update with the parameters as they lie; experts that changed places in
    the export are refused on all ranks alike."""
    ours = [rank["conserved"] for rank in seen(ranks, case)]
    names = sorted(load_file(checkpoints(case.split()[0]) / "model.safetensors"))
    assert ours[0][1] == names and all(compared == len(names) for compared, *_ in ours)
    (told,) = {one[2] for one in ours}
    assert re.search(
        r"version 2\): got \d+ of .* expert \d+, gate_proj.weight: what layer \d+, expert \d+, gate_proj", told
    )
    assert sum(one[3] for one in ours) >= 4


@pytest.mark.parametrize("ranks, case", EXACT)
def test_a_rank_reads_its_own_bytes_of_a_checkpoint(seen, checkpoints, ranks, case):
    """Float32 files into float32 parameters: as many bytes as it holds, and not one more."""
    ours = seen(ranks, case)
    assert all(read == held > 0 for read, held in (rank["read"] for rank in ours))
    whole = sum(tensor.nbytes for tensor in load_file(checkpoints(case.split()[0]) / "model.safetensors").values())
    assert ranks == 1 or all(rank["read"][0] < whole for rank in ours)


@pytest.mark.parametrize("ranks, case", WRITTEN)
def test_what_the_ranks_write_transformers_reads(seen, checkpoints, ranks, case):
    """Files of the ranks with one index: bit for bit the tensors of the checkpoint, none missing and none besides."""
    from transformers import AutoModelForCausalLM

    folder, source = seen(ranks, case, written=True), checkpoints(case.split()[0])
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {file: load_file(folder / file) for file in sorted(set(index.values()))}
    assert len(files) > 4 and sorted(files) == sorted(file.name for file in folder.glob("*.safetensors"))
    assert all(name in files[file] for name, file in index.items())
    original = load_file(source / "model.safetensors")
    assert {name for tensors in files.values() for name in tensors} == index.keys() == original.keys()
    assert all(torch.equal(files[index[name]][name], tensor) for name, tensor in original.items())
    theirs = AutoModelForCausalLM.from_pretrained(source).state_dict()
    ours, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("ranks, case", EXACT)
def test_the_ledger_holds_layers_with_experts_only(seen, checkpoints, ranks, case):
    facts = read_model(checkpoints(case.split()[0]))
    ours = seen(ranks, case)
    assert {layer for rank in ours for layer in rank["layers"]} == set(facts.moe_layers)
    forwarded = sum(prompt + completion - 1 for prompt, completion in LENGTHS)
    assert sum(rank["tallies"][0]["native_positions"] for rank in ours) == len(facts.moe_layers) * forwarded
    for rank in ours:
        forward, update = rank["tallies"]
        assert forward["consumed"] == forward["expected"] > 0 and forward["expected"] % len(rank["layers"]) == 0
        again = len(rank["microbatches"]) * len(rank["recomputed_layers"])
        assert update["consumed"] == update["expected"] == forward["expected"] + again
        assert forward["applied_mismatch"] == update["applied_mismatch"] == 0
        assert forward["native_mismatch"] > 0.9 * forward["native_positions"]


@pytest.mark.parametrize("ranks, case", BIASED)
def test_the_expert_bias_follows_the_recorded_load(seen, checkpoints, ranks, case):
    """Each real token counts once: not again when recomputed or in the forward-only pass, padding never."""
    facts, ours = read_model(checkpoints(case.split()[0])), seen(ranks, case)
    loaded, updated = merged(ours, "loaded"), merged(ours, "updated")
    loads = recorded_load(facts)
    assert largest(merged(ours, "loads"), loads) == 0
    for layer, load in loads.items():
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        assert torch.equal(updated[name], loaded[name] + RATE * torch.sign(load.mean() - load))


@pytest.mark.parametrize("ranks, case", RESUMED)
def test_the_expert_bias_outlives_a_restart_and_a_skipped_step(seen, ranks, case):
    for rank in seen(ranks, case):
        assert all(torch.equal(rank["resumed"][name], tensor) for name, tensor in rank["updated"].items())
        applied, after = rank["skipped"]
        assert not applied and all(torch.equal(after[name], tensor) for name, tensor in rank["updated"].items())


@pytest.mark.long
@pytest.mark.parametrize("model", BFLOAT16)
def test_bfloat16_is_close_and_keeps_the_expert_bias_in_float32(seen, reference, checkpoints, model):
    (ours,) = seen(1, f"{model} bfloat16")
    original = load_file(checkpoints(model) / "model.safetensors")
    biases = {name: tensor for name, tensor in original.items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == len(ours["layers"]) * model.startswith(WITH_BIAS)
    assert all(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in biases.values())
    assert all(torch.equal(ours["loaded"][name], tensor) for name, tensor in biases.items())
    moved = {name: (ours["updated"][name] - tensor).abs().max() for name, tensor in biases.items()}
    assert all(move == pytest.approx(RATE, rel=1e-3) for move in moved.values())
    logprobs = reference(model, forced=True).logprobs
    difference = torch.cat([(ours["logprobs"][i] - logprobs[i]).abs() for i in logprobs])
    assert 1e-4 < difference.mean() < 0.1


RUN = """\
run: {{name: x, runs_dir: {root}, steps: 1}}
model: {{path: {model}}}
task:
  train: [{{name: x, data: x}}]
  heldout: [{{name: x, data: x}}]
  rewards: {{exact: {{function: moe_rl.errors.describe}}}}
  pass_reward: exact
rollout: {{prompts_per_step: 1, group_size: 2, max_prompt_tokens: 10, max_completion_tokens: 6, kv_cache_mib: 1}}
train: {{dtype: float32, microbatch_tokens: 40, optimizer: {{lr: 1.0e-3}}}}
eval: {{prompts: 1}}
parallel: {parallel}
"""


@pytest.mark.parametrize(
    "case", [pytest.param("deepseek PP2-VPP2-uneven-uniform", marks=pytest.mark.long), "glm-groups TP2-EP2-uniform"]
)
def test_one_process_exports_a_run_of_any_layout(seen, checkpoints, tmp_path, case):
    """Without torchrun and without a word about the layout. What is written are the weights after the update."""
    model, layout = case.split()
    ours = seen(2, case)
    saved = seen(2, case, written=True).with_name(f"{case} saved")
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(saved)
    parallel = json.dumps(LAYOUTS[layout]["parallel"])
    (run / "config.yaml").write_text(RUN.format(root=tmp_path, model=checkpoints(model), parallel=parallel))
    command = [sys.executable, ROOT / "tools/export_hf.py", "--run", run, "--out", tmp_path / "out"]
    alone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*map(str, command), "--json", str(tmp_path / "result.json")],
        env=alone | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "the weights after 1 steps" in done.stdout, done.stderr[-3000:]
    written = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    updated = merged(ours, "updated")
    assert written.keys() == updated.keys() and all(torch.equal(t, updated[name]) for name, t in written.items())
    assert any(not torch.equal(t, merged(ours, "loaded")[name]) for name, t in written.items())
    result = json.loads((tmp_path / "result.json").read_text())
    size = {"tensors": len(written), "bytes": sum(tensor.nbytes for tensor in written.values())}
    assert result == {"folder": str(tmp_path / "out"), "dtype": "float32", "step": 1} | size
