"""Adapters against `peft` with `transformers` and the same routes, in every kind of layout."""

import functools
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moe_rl import checkpoint_folder as checkpoints
from moe_rl.config.layout import make_layout
from moe_rl.config.training import LoraConfig, ParallelConfig
from moe_rl.errors import ConfigError
from moe_rl.models.hf import read_model
from moe_rl.models.peft import folder_problems
from moe_rl.planning.parameters import adapter_buffers
from moe_rl.planning.sampler_memory import trained_elements
from moe_rl.proof.batch import batch, make_checkpoint
from moe_rl.proof.matrix import largest, merged
from moe_rl.proof.reference import reference as transformers
from tests.distributed.jobs import lora
from tests.distributed.usual import with_seeds
from tests.support.adapted import ALPHA, RANK, AdaptedModel, random_adapters, write_adapters
from tests.support.families import write_checkpoint
from tests.support.refusals import refused

ALL = ("attention", "mlp", "experts")
OVERLAP = {"overlap_expert_parallel_comm": True}
INTERLEAVED = {"pipeline": 2, "virtual_pipeline": 2}
# {case: (ranks, model, targets, parallel, train)}; in those that are named "shared" experts share their outer matrices
CASES = {
    "one": (1, "qwen", ALL[::2], {}, {}),
    "DP2": (2, "qwen", ALL[::2], {}, {}),
    "DP2 whole": (2, "qwen", ALL[::2], {}, {"distributed_optimizer": False}),
    "EP2": (2, "qwen", ALL[::2], {"expert": 2}, {}),
    "EP2 experts alone": (2, "qwen", ("experts",), {"expert": 2}, {"recompute": "moe"}),
    "EP2 attention alone": (2, "qwen", ("attention",), {"expert": 2}, {"recompute": "uniform"}),
    "EP2 overlap": (2, "qwen", ALL[::2], {"expert": 2}, OVERLAP),
    "TP2": (2, "qwen", ALL[::2], {"tensor": 2}, {}),
    "TP2 EP2 uniform": (2, "qwen", ALL[::2], {"tensor": 2, "expert": 2}, {"recompute": "uniform"}),
    "TP2 EP2 overlap": (2, "qwen", ALL[::2], {"tensor": 2, "expert": 2}, OVERLAP),
    "TP2 ETP2": (2, "qwen", ALL[::2], {"tensor": 2, "expert_tensor": 2}, {}),
    "ETP2": (2, "qwen", ALL[::2], {"expert_tensor": 2}, {}),
    "CP2 EP2 moe": (2, "qwen", ALL[::2], {"context": 2, "expert": 2}, {"recompute": "moe"}),
    "PP2 block": (2, "qwen", ALL[::2], {"pipeline": 2}, {"recompute": "block"}),
    "PP2 VPP2 uniform": (2, "qwen", ALL[::2], INTERLEAVED, {"recompute": "uniform"}),
    # dense layers and shared experts, biases of queries, keys and values
    "mixed TP2 EP2": (2, "qwen-mixed", ALL, {"tensor": 2, "expert": 2}, {"recompute": "uniform"}),
    "glm TP2 EP2": (2, "glm-groups", ALL, {"tensor": 2, "expert": 2}, {}),
    "glm TP2 overlap": (2, "glm-groups", ALL, {"tensor": 2, "expert": 2}, OVERLAP),
    # latent attention: down-projections that are whole on every rank
    "deepseek TP2 EP2": (2, "deepseek", ALL, {"tensor": 2, "expert": 2}, {"recompute": "uniform"}),
    "moonlight TP2 ETP2": (2, "moonlight", ALL, {"tensor": 2, "expert_tensor": 2}, {}),
    "tied PP2": (2, "qwen-tied", ALL, {"pipeline": 2}, {"recompute": "uniform"}),
    "TP2 EP2 PP2": (4, "qwen", ALL[::2], {"tensor": 2, "expert": 2, "pipeline": 2}, {}),
    "TP2 EP2 ETP2": (4, "qwen", ALL[::2], {"tensor": 2, "expert": 2, "expert_tensor": 2}, {}),
    "EP2 VPP2 overlap": (4, "qwen", ALL[::2], {"expert": 2, **INTERLEAVED}, OVERLAP),
    "TP2 CP2 EP2": (4, "qwen", ALL[::2], {"tensor": 2, "context": 2, "expert": 2}, {}),
    "shared": (1, "qwen", ALL[::2], {}, {}),
    "shared DP2": (2, "qwen", ALL[::2], {}, {}),
    "shared EP2 moe": (2, "qwen", ALL[::2], {"expert": 2}, {"recompute": "moe"}),
    "shared TP2 EP2": (2, "qwen", ALL[::2], {"tensor": 2, "expert": 2}, {"recompute": "uniform"}),
    "shared TP2 ETP2": (2, "qwen", ALL[::2], {"tensor": 2, "expert_tensor": 2}, {}),
    "shared ETP2": (2, "qwen", ("experts",), {"expert_tensor": 2}, {}),
    "shared EP2 whole overlap": (2, "qwen", ALL[::2], {"expert": 2}, {**OVERLAP, "distributed_optimizer": False}),
    "shared moonlight TP2": (2, "moonlight", ALL, {"tensor": 2}, {}),
    "shared TP2 EP2 ETP2": (4, "qwen", ALL[::2], {"tensor": 2, "expert": 2, "expert_tensor": 2}, {}),
    "shared TP2 EP2 PP2": (4, "qwen", ALL[::2], {"tensor": 2, "expert": 2, "pipeline": 2}, {}),
}
USUAL = ["one", "TP2", "TP2 EP2 uniform", "glm TP2 EP2", "TP2 ETP2", "shared EP2 moe", "shared TP2 EP2"]


def is_shared(case):
    return case.startswith("shared")


def outer(name):
    """Whether the experts of a layer may share this tensor of an adapter."""
    return bool(re.search(r"\.experts\.\d+\.(?:(?:gate|up)_proj\.lora_A|down_proj\.lora_B)", name))


def of_first(name):
    return re.sub(r"\.experts\.\d+\.", ".experts.0.", name) if outer(name) else name


@pytest.fixture(scope="session")
def given(tmp_path_factory):
    """given(model, targets, shared) -> the checkpoint, a folder of random adapters, and what `transformers` makes of
    both. The gradient of a shared matrix is the sum over the experts."""

    @functools.cache
    def checkpoint(model):
        folder = tmp_path_factory.mktemp(model)
        return make_checkpoint(folder) if model == "qwen" else write_checkpoint(model, folder)

    @functools.cache
    def made(model, targets, shared=False):
        adapters = random_adapters(checkpoint(model), targets)
        if shared:
            adapters = {name: adapters[of_first(name)].clone() for name in adapters}
        folder = write_adapters(tmp_path_factory.mktemp("adapters") / "peft", adapters)
        _, routes = batch(read_model(checkpoint(model)))
        logprobs, gradients = AdaptedModel(checkpoint(model), adapters).run(routes)
        if shared:
            sums = {}
            for name, gradient in gradients.items():
                sums[of_first(name)] = sums.get(of_first(name), 0) + gradient
            gradients = {name: sums[of_first(name)] for name in gradients}
        return checkpoint(model), folder, adapters, (logprobs, gradients)

    return made


@pytest.fixture(scope="session")
def base(given):
    """base(model, targets) -> what `transformers` makes of the checkpoint alone, with its own choice of experts."""

    @functools.cache
    def made(model, targets):
        return transformers(given(model, targets)[0], None)

    return made


@pytest.fixture(scope="session")
def seen(given, on_ranks, tmp_path_factory):
    """seen(case) -> what each rank saw."""

    @functools.cache
    def run(name):
        ranks, model, targets, parallel, train = CASES[name]
        checkpoint, start, _, _ = given(model, targets, is_shared(name))
        case = {"checkpoint": str(checkpoint), "start": str(start), "targets": targets, "shared": is_shared(name)}
        case["sync"] = str(tmp_path_factory.mktemp("sync"))
        return on_ranks(ranks, lora.run, case | {"parallel": parallel, "train": train})

    return run


@pytest.mark.parametrize("case", CASES)
def test_adapters_equal_peft(given, seen, case):
    _, model, targets, *_ = CASES[case]
    _, _, adapters, (logprobs, gradients) = given(model, targets, is_shared(case))
    ours = seen(case)
    begun = merged(ours, "begun")
    assert begun.keys() == adapters.keys() and all(torch.equal(begun[name], adapters[name]) for name in adapters)
    assert largest(merged(ours, "logprobs"), logprobs) < 2e-6
    assert largest(merged(ours, "grads"), gradients) < 1e-6
    assert min(gradient.abs().max() for gradient in gradients.values()) > 1e-5
    trained = {of_first(name) if is_shared(case) else name for name in gradients}
    norm = math.sqrt(sum(gradients[name].double().square().sum() for name in trained))
    assert [one["grad_norm"] for one in ours] == pytest.approx([norm] * len(ours), rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_model_without_adapters(given, seen, base, case):
    _, model, targets, *_ = CASES[case]
    assert largest(merged(seen(case), "reference"), base(model, targets).logprobs) < 2e-6
    assert largest(merged(seen(case), "logprobs"), base(model, targets).logprobs) > 1e-2


@pytest.mark.parametrize("case", CASES)
def test_exported_weights_are_base_plus_delta_bit_for_bit(given, seen, case):
    _, model, targets, *_ = CASES[case]
    checkpoint, _, adapters, _ = given(model, targets, is_shared(case))
    base = load_file(checkpoint / "model.safetensors")
    for when, held in (("merged", adapters), ("updated_merged", merged(seen(case), "updated"))):
        found = merged(seen(case), when)
        assert found.keys() == base.keys()
        changed = 0
        for name, weight in base.items():
            at = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{at}A.weight" in held:
                delta = held[f"{at}B.weight"].double() @ held[f"{at}A.weight"].double()
                weight, changed = (weight.double() + ALPHA / RANK * delta).float(), changed + 1
            assert torch.equal(found[name], weight), name
        assert 2 * changed == len(held)


@pytest.mark.parametrize("case", CASES)
def test_a_sampler_makes_the_same_weights_of_the_adapters(seen, case):
    ours = seen(case)
    whole, adapters = merged(ours, "updated_merged"), merged(ours, "updated")
    size = sum(tensor.nbytes for tensor in adapters.values())
    for weights, _, count in ours[0]["sent"]:
        assert weights.keys() == whole.keys() and all(torch.equal(weights[name], whole[name]) for name in whole)
        assert count == size < sum(tensor.nbytes for tensor in whole.values()) / 2
    assert len({digest for _, digest, _ in ours[0]["sent"]}) == 1


@pytest.mark.parametrize("case", CASES)
def test_only_adapters_are_trained(seen, case):
    for one in seen(case):
        assert one["with_main_grad"] == one["adapter_parameters"] > 0
    begun, updated = (merged(seen(case), when) for when in ("begun", "updated"))
    assert not any(torch.equal(updated[name], begun[name]) for name in begun)


@pytest.mark.parametrize("case", CASES)
def test_the_plan_knows_the_buffers_of_adapters(given, seen, case):
    ranks, model, targets, parallel, train = CASES[case]
    facts = read_model(given(model, targets)[0])
    settings = LoraConfig(rank=RANK, alpha=ALPHA, targets=targets, shared_outer=is_shared(case))
    layout = make_layout(ParallelConfig(**parallel), facts, ranks)
    for one in seen(case):
        planned = [adapter_buffers(facts, layout, range(run[0], run[-1] + 1), settings) for run in one["runs"]]
        padded = train.get("distributed_optimizer", True)
        sizes = [b.padded_elements if padded else b.elements for buffers in planned for b in buffers]
        assert sorted(sizes) == sorted(one["buffers"])


# {layout: (ranks, parallel)}
ELSEWHERE = {
    "the same layout": (2, {"tensor": 2, "expert": 2}),
    "one rank": (1, {}),
    "PP2 VPP2": (2, INTERLEAVED),
    "TP2 ETP2": (2, {"tensor": 2, "expert_tensor": 2}),
}


@pytest.fixture(scope="session", params=[False, with_seeds(True, usual=False)], ids=["own", "shared"])
def saved(request, given, on_ranks, tmp_path_factory):
    """A case with the folder of its checkpoint and of its adapters for peft, and what its ranks saw."""
    checkpoint, start, _, _ = given("qwen", ALL[::2], request.param)
    case = {"checkpoint": str(checkpoint), "start": str(start), "targets": ALL[::2], "shared": request.param}
    folder = tmp_path_factory.mktemp("saved")
    case |= {
        "save": str(folder / "checkpoints"),
        "peft": str(folder / "peft"),
        "parallel": ELSEWHERE["the same layout"][1],
    }
    return case, on_ranks(2, lora.run, case)


@pytest.mark.parametrize("layout", [with_seeds(one, usual=one in ("the same layout", "one rank")) for one in ELSEWHERE])
def test_a_resumed_run_has_the_same_adapters_and_optimizer(saved, on_ranks, layout):
    case, seen = saved
    ranks, parallel = ELSEWHERE[layout]
    resumed = on_ranks(ranks, lora.resume, case | {"parallel": parallel, "start": None})
    updated, loaded = merged(seen, "updated"), merged(resumed, "loaded")
    assert loaded.keys() == updated.keys() and all(torch.equal(loaded[name], updated[name]) for name in loaded)
    assert [one["updates"] for one in resumed] == [2] * ranks
    there, here = merged(seen, "continued"), merged(resumed, "continued")
    if layout == "the same layout":
        assert all(torch.equal(here[name], there[name]) for name in there)
    # Adam divides by the gradient's size, so an element whose gradient is rounding may move either way.
    apart = torch.cat([(here[name] - there[name]).abs().flatten() for name in there])
    assert apart.quantile(0.99) < 1e-5 < max((there[name] - updated[name]).abs().max() for name in there)


def test_experts_that_differ_cannot_share(given):
    from moe_rl.megatron.lora import _stored

    _, start, adapters, _ = given("qwen", ALL[::2])
    file = start / "adapter_model.safetensors"
    name = next(name for name in adapters if outer(name) and ".experts.1." in name)
    with safe_open(file, framework="pt") as tensors:
        assert torch.equal(_stored(file, tensors, name, adapters[name].shape, shared=False), adapters[name])
        with refused(ConfigError, "train.lora.shared_outer", key="train.lora.start", tensor=name):
            _stored(file, tensors, name, adapters[name].shape, shared=True)


def test_a_checkpoint_has_adapters_only(saved):
    from megatron.core import dist_checkpointing

    case, seen = saved
    stored = dist_checkpointing.load_tensors_metadata(str(checkpoints.find(Path(case["save"]))))
    weights = [name for name in stored if not name.startswith("optimizer.")]
    assert all("lora." in name for name in stored) and len(stored) == 3 * len(weights)
    # one A of each parameter of Megatron, which may be several of peft's
    assert {name.split(".lora_")[0] for name in merged(seen, "begun")} >= {
        name.removeprefix("lora.").rpartition(".")[0] for name in weights
    }
    settings = LoraConfig(rank=RANK, alpha=ALPHA, targets=ALL[::2], shared_outer=case["shared"])
    planned = trained_elements(read_model(Path(case["checkpoint"])), settings)
    assert sum(math.prod(tensor.global_shape) for tensor in stored.values()) == 3 * planned


def test_peft_loads_the_adapters(given, saved):
    """All of them, by peft's own code, experts too; and what they make is what the merged weights make."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    case, seen = saved
    checkpoint, _, adapters, _ = given("qwen", ALL[::2], case["shared"])
    written = load_file(Path(case["peft"]) / "adapter_model.safetensors")
    assert written.keys() == adapters.keys() and all(torch.equal(written[name], adapters[name]) for name in written)
    facts = read_model(checkpoint)
    assert not list(folder_problems(Path(case["peft"]), facts, RANK, ALPHA, ALL[::2], key="train.lora.start"))
    tokens = torch.arange(1, 40)[None]
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        without = base(tokens).logits.log_softmax(-1)
        theirs = PeftModel.from_pretrained(base, case["peft"])(tokens).logits.log_softmax(-1)
        ours = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        state = stacked(merged(seen, "merged"), facts)
        ours.load_state_dict(state)
        ours = ours(tokens).logits.log_softmax(-1)
    assert (ours - theirs).abs().max() < 1e-5 < (ours - without).abs().max() / 1000


def stacked(tensors, facts):
    """Weights under published names, as transformers holds those of Qwen3-MoE: each layer's experts in one tensor."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in facts.moe_layers:
        at = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{at}{number}.{one}_proj.weight"] for number in range(facts.num_experts)])
            for one in ("gate", "up", "down")
        )
        found |= {f"{at}gate_up_proj": torch.cat((gate, up), 1), f"{at}down_proj": down}
    return found


def test_a_product_that_is_counted_once_per_rank_is_named(given, on_ranks):
    """As fc2's of a shared expert whose output is summed over ranks after the adapter's own sum."""
    checkpoint, start, *_ = given("glm-groups", ALL)
    case = {"checkpoint": str(checkpoint), "start": str(start), "targets": ALL}
    for told, fired in on_ranks(2, lora.count_twice, case | {"parallel": {"tensor": 2, "expert": 2}}):
        assert fired > 0 and "2.00 times" in told
        assert "self_attn.o_proj" in told and "mlp.down_proj" in told


@pytest.mark.parametrize(
    ("dtype", "where", "told", "shared"),
    [
        # each rank merges A into other rows, so their sums cannot show that the copies of A differ
        ("float32", "self_attention.linear_qkv.lora.a", ("different copies", "layer 1", "q_proj"), False),
        (
            "bfloat16",
            "mlp.experts.local_experts.2.linear_fc1.lora.b",
            ("optimizer wrote", "expert 10", "gate_proj"),
            False,
        ),
        (
            "float32",
            "mlp.experts.local_experts.2.linear_fc2.lora.b",
            ("different copies", "expert 0", "down_proj"),
            True,
        ),
    ],
)
def test_damaged_adapters_are_named(given, on_ranks, dtype, where, told, shared):
    checkpoint, start, *_ = given("qwen", ALL[::2], shared)
    case = {"checkpoint": str(checkpoint), "start": str(start), "targets": ALL[::2], "train": {"dtype": dtype}}
    case["shared"] = shared
    for said in on_ranks(2, lora.damaged, case | {"where": where, "parallel": {"tensor": 2, "expert": 2}}):
        assert all(part in said for part in told), said
