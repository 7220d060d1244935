"""What a model computes with is compared with what was confirmed, on layers as vLLM has them on a CPU and elsewhere."""

from types import SimpleNamespace

import pytest
import torch

HIDDEN, INNER, EXPERTS, VOCAB, PADDED = 12, 6, 4, 20, 24
LAYER = "model.layers.3."
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    LAYER + "input_layernorm.weight": (HIDDEN,),
    LAYER + "self_attn.q_proj.weight": (8, HIDDEN),
    LAYER + "self_attn.k_proj.weight": (4, HIDDEN),
    LAYER + "self_attn.v_proj.weight": (4, HIDDEN),
    LAYER + "self_attn.k_proj.bias": (4,),
    LAYER + "mlp.gate.weight": (EXPERTS, HIDDEN),
    **{f"{LAYER}mlp.experts.{expert}.{one}_proj.weight": (INNER, HIDDEN) for expert in range(EXPERTS)
       for one in ("gate", "up")},
    **{f"{LAYER}mlp.experts.{expert}.down_proj.weight": (HIDDEN, INNER) for expert in range(EXPERTS)},
}  # fmt: skip


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    made[LAYER + "self_attn.q_proj.weight"][0, 0] = -0.0  # which no product with the identity gives back
    return made


class Model(torch.nn.Module):
    """Has the layers of SHAPES: one matrix for q, k and v, one for gate and up, padded rows of the vocabulary.

    packed: its matrices are in closures, as on a CPU. tensor_parallel: workers that share the experts.
    """

    def __init__(self, *, packed, tensor_parallel=1):
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        super().__init__()
        self.packed, self.packed_modules_mapping = packed, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        layer = self.add("model.layers", torch.nn.ModuleList([torch.nn.Module() for _ in range(4)]))[3]
        self.qkv = self.linear([8, 4, 4], bias=True)
        self.gate = self.linear([EXPERTS])
        for name, module in {
            "input_layernorm": self.holding(weight=torch.zeros(HIDDEN, dtype=torch.bfloat16)),
            "self_attn.qkv_proj": self.qkv,
            "mlp.gate": self.gate,
        }.items():
            self.add(name, module, layer)
        self.experts = RoutedExperts.__new__(RoutedExperts)
        torch.nn.Module.__init__(self.experts)
        self.experts.quant_method = None
        self.experts.moe_config = SimpleNamespace(
            num_experts=EXPERTS, num_logical_experts=EXPERTS,
            moe_parallel_config=SimpleNamespace(tp_size=tensor_parallel),
        )  # fmt: skip
        self.experts._map_global_expert_id_to_local_expert_id = lambda expert: expert
        self.add("mlp.experts.routed_experts", self.experts, layer)
        self.embedding = self.holding(weight=torch.zeros(PADDED, HIDDEN, dtype=torch.bfloat16))
        self.add("model.embed_tokens", self.embedding)

    def add(self, name, module, owner=None):
        *path, last = name.split(".")
        owner = owner or self
        for one in path:
            if not hasattr(owner, one):
                owner.add_module(one, torch.nn.Module())
            owner = getattr(owner, one)
        owner.add_module(last, module)
        return module

    def holding(self, **values):
        module = torch.nn.Module()
        for name, value in values.items():
            module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
        return module

    def linear(self, sizes, *, bias=False):
        values = {"weight": torch.zeros(0 if self.packed else (sum(sizes), HIDDEN), dtype=torch.bfloat16)}
        module = self.holding(**values, **({"bias": torch.zeros(sum(sizes), dtype=torch.bfloat16)} if bias else {}))
        module.output_partition_sizes, module.input_size = sizes, HIDDEN
        if self.packed:
            module.cpu_linear = None
        return module

    def load(self, given):
        """Take tensors as vLLM's loaders do."""

        def matrix(module, value):
            if self.packed:
                module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, value, bias)
            else:
                module.weight.copy_(value)

        at = lambda name: given[LAYER + name]  # noqa: E731
        matrix(self.qkv, torch.cat([at(f"self_attn.{one}_proj.weight") for one in "qkv"]))
        self.qkv.bias[8:12] = at("self_attn.k_proj.bias")
        matrix(self.gate, at("mlp.gate.weight"))
        self.model.layers[3].input_layernorm.weight.copy_(at("input_layernorm.weight"))
        self.embedding.weight[:VOCAB] = given["model.embed_tokens.weight"]
        whole = [
            torch.cat([at(f"mlp.experts.{expert}.{one}_proj.weight") for one in ("up", "gate")])
            for expert in range(EXPERTS)
        ]
        down = [at(f"mlp.experts.{expert}.down_proj.weight").T for expert in range(EXPERTS)]
        for name, stack in {"w13_weight": torch.stack(whole), "w2_weight": torch.stack(down)}.items():
            stack = torch.nn.functional.pad(stack, (0, 2))  # a kernel's layout has other columns, and padding
            setattr(self.experts, name, torch.nn.Parameter(stack, requires_grad=False))


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def update(request):
    """update(confirmed, loaded, version) -> what is wrong afterwards."""
    from moe_rl.weights.read_back import ReadBack

    model = Model(packed=request.param)
    model.load(tensors(0))
    back = ReadBack(model, SHAPES, torch.bfloat16, torch.device("cpu"))

    def call(confirmed, loaded, version):
        back.begin()
        for part in (list(confirmed)[::2], list(confirmed)[1::2]):  # it comes in parts
            back.confirmed({name: confirmed[name] for name in part})
        model.load(loaded)
        return back.wrong(version)

    return call


def test_what_was_confirmed_is_what_is_computed_with(update):
    assert update(tensors(1), tensors(1), 1) == update(tensors(2), tensors(2), 2) == []


def with_bit(tensor):
    changed = tensor.clone()
    changed.view(torch.int16).view(-1)[5] ^= 1
    return changed


EXPERT = LAYER + "mlp.experts.{}.down_proj.weight"
FAULTS = {
    "zeroed": ({EXPERT.format(2): torch.zeros(HIDDEN, INNER)}, ["layer 3, expert 2, down_proj.weight: only zeros"]),
    "exchanged": (
        {EXPERT.format(1): tensors(2)[EXPERT.format(3)], EXPERT.format(3): tensors(2)[EXPERT.format(1)]},
        [
            "layer 3, expert 1, down_proj.weight: what layer 3, expert 3, down_proj.weight is",
            "layer 3, expert 3, down_proj.weight: what layer 3, expert 1, down_proj.weight is",
        ],
    ),
    "one bit of v": (
        {LAYER + "self_attn.v_proj.weight": with_bit(tensors(2)[LAYER + "self_attn.v_proj.weight"])},
        ["layer 3, self_attn.v_proj.weight: other values"],
    ),
    **{
        f"stale {name}": (
            {LAYER + name: tensors(1)[LAYER + name]}, [f"layer 3, {name}: stale, what it was in version 1"]
        )
        for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.k_proj.bias", "mlp.gate.weight",
                     "input_layernorm.weight")
    },
    "stale embedding": (
        {"model.embed_tokens.weight": tensors(1)["model.embed_tokens.weight"]},
        ["model.embed_tokens.weight: stale, what it was in version 1"],
    ),
    "stale up matrix": (
        {LAYER + "mlp.experts.0.up_proj.weight": tensors(1)[LAYER + "mlp.experts.0.up_proj.weight"]},
        ["layer 3, expert 0, gate_up_proj.weight: other values"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_wrong_part_is_named_and_no_other(update, fault):
    wrong, said = FAULTS[fault]
    update(tensors(1), tensors(1), 1)
    assert update(tensors(2), tensors(2) | wrong, 2) == said


def test_what_a_worker_holds_in_part_is_not_compared_which_the_log_says(capsys):
    from moe_rl.weights.read_back import ReadBack

    model = Model(packed=True, tensor_parallel=2)
    model.load(tensors(1))
    model.qkv.output_partition_sizes = [4, 2, 2]
    back = ReadBack(model, SHAPES, torch.bfloat16, torch.device("cpu"))
    assert "12 of 15 parts cannot be read back here" in capsys.readouterr().out
    model.gate.output_size_per_partition = EXPERTS // 2
    ReadBack(model, SHAPES, torch.bfloat16, torch.device("cpu"))
    assert "13 of 15 parts cannot be read back here" in capsys.readouterr().out
    back.begin()
    back.confirmed(tensors(1))
    model.load(tensors(1) | {LAYER + "mlp.gate.weight": tensors(2)[LAYER + "mlp.gate.weight"]})
    assert back.wrong(1) == ["layer 3, mlp.gate.weight: other values"]
