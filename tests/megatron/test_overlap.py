"""One MoE layer on one rank that computes while its rows are exchanged: which operations overlap, and that results do
not change. Tests compare the order of events and no durations, so they do not depend on speed."""

import numpy as np
import pytest
import torch

from moe_rl.config.training import ParallelConfig
from moe_rl.errors import ConfigError, ReplayError
from moe_rl.planning.dispatch import DispatchGroup
from moe_rl.replay.plans import DispatchRules, plan_dispatch
from moe_rl.replay.replay_pass import ReplayPass
from tests.megatron.models import TRAIN, facts, table
from tests.support.refusals import refused

ROWS, EXPERTS, TOP_K = 14, 12, 4


class Layer:
    """The first MoE layer of a random model, with or without shared experts, and random routes for it."""

    def __init__(self, shared, dtype=torch.float32):
        from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

        from moe_rl.megatron.model import transformer_config
        from moe_rl.megatron.router import ReplaySeqParams
        from moe_rl.megatron.specs import replay_spec

        config = transformer_config(facts(shared_intermediate_size=24 if shared else 0), TRAIN, ParallelConfig())
        config.moe_router_dtype = {torch.float32: "fp32", torch.float64: "fp64"}[dtype]
        build = replay_spec(config).layer_specs[0].submodules.mlp
        self.moe = build(config=config, pg_collection=get_default_pg_collection(), is_mtp_layer=False)
        self.moe.set_layer_number(1)
        self.moe.to(dtype)
        self.random = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in self.moe.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=self.random))
        self.hidden = torch.randn(ROWS, 1, config.hidden_size, generator=self.random).to(dtype)
        self.weight = torch.randn(self.hidden.shape, generator=self.random).to(dtype)
        routes = torch.rand(ROWS, EXPERTS, generator=self.random).topk(TOP_K)[1]
        self.moe.router.seq_params = ReplaySeqParams(lengths=(ROWS,), tokens=ROWS)
        self.tables = [table({0: routes}, EXPERTS)]

    def plans(self, chunks):
        alone, natural = DispatchGroup(EXPERTS, 1, 1, 0), np.arange(EXPERTS)[None]
        rules = DispatchRules((0,), alone, lambda counts: counts[None], natural, overlap_chunks=chunks)
        return plan_dispatch(self.tables, rules).by_microbatch

    def pass_under(self, plans, microbatches=1):
        tables, plans = microbatches * self.tables, microbatches * plans
        return ReplayPass(tables, (0,), mode="replay", name="test", rank=0, plans=plans)

    def run(self, plans, timeline=None):
        """Run a pass with these plans; return (output, gradients)."""
        hidden = self.hidden.clone().requires_grad_()
        self.moe.zero_grad()
        with self.pass_under(plans) as opened:
            opened.begin_forward(0, torch.arange(ROWS))
            self.moe.router.handle = opened.handle(0)
            output, _ = self.moe(hidden)
            (output * self.weight).sum().backward()
        assert opened.seen.tally.planned == opened.seen.tally.dispatched == 1
        return output.detach(), [hidden.grad, *(parameter.grad.clone() for parameter in self.moe.parameters())]

    def timeline(self, chunks):
        """Return {(name, backward): span} of a pass."""
        from benchmarks.timeline import Timeline

        plans = self.plans(chunks)
        timeline = Timeline(self.moe, 0, plans[0][0])
        with timeline.recording():
            self.run(plans)
        spans = {(span.name, span.backward): span for span in timeline.spans}
        assert len(spans) == len(timeline.spans) and 0 <= timeline.waited() <= timeline.under_way()
        return spans


@pytest.fixture(params=[False, True], ids=["", "shared experts"])
def layer(one_rank, request):
    return Layer(request.param)


def under(exchange, computation):
    """Check that a computation runs after an exchange begins and before the host waits for its rows."""
    return exchange.begin < computation.begin and computation.end < exchange.waiting


def test_in_one_chunk_no_bit_changes(layer):
    (plain, gradients), (output, overlapped) = layer.run(layer.plans(0)), layer.run(layer.plans(1))
    assert torch.equal(plain, output)
    assert all(torch.equal(one, other) for one, other in zip(gradients, overlapped, strict=True))
    assert all(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunks", [2, 3, 20])
def test_in_chunks_only_the_rounding_of_sums_changes(one_rank, chunks, dtype):
    """The difference is a few units of rounding, and shrinks with them. 20 chunks are more than there are rows."""
    layer = Layer(shared=True, dtype=dtype)
    (plain, gradients), (output, overlapped) = layer.run(layer.plans(0)), layer.run(layer.plans(chunks))
    for one, other in zip([plain, *gradients], [output, *overlapped], strict=True):
        assert (one - other).norm() <= 5 * torch.finfo(dtype).eps * one.norm()
    assert any(not torch.equal(one, other) for one, other in zip(gradients, overlapped, strict=True))


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_router_and_the_shared_experts_are_under_the_first_rows(layer, chunks):
    spans = layer.timeline(chunks)
    computed = {"router", "shared experts"} if layer.moe.shared_experts is not None else {"router"}
    for backward in (False, True):
        assert all(under(spans["rows 0", backward], spans[name, backward]) for name in computed)
    # The weights are sent right after the router. In the backward, their gradients are sent before those of the rows.
    assert spans["router", False].end < spans["weights 0", False].begin < spans["weights 0", False].waiting
    assert spans["weights 0", True].begin < spans["rows 0", True].begin
    assert spans["weights 0", True].end < spans["router", True].begin


def test_a_chunk_travels_while_another_is_computed(layer):
    spans = layer.timeline(3)
    for number in (0, 1):
        # In the forward, one chunk is computed while the next arrives and the previous one returns.
        assert under(spans[f"rows {number + 1}", False], spans[f"experts {number}", False])
        assert under(spans[f"back {number}", False], spans[f"experts {number + 1}", False])
        # In the backward, the same in reverse order.
        assert under(spans[f"back {number}", True], spans[f"experts {number + 1}", True])
        assert under(spans[f"rows {number + 1}", True], spans[f"experts {number}", True])


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("fault", ["another microbatch", "fewer rows", "closed"])
def test_a_key_that_is_not_its_own_is_refused_before_anything_is_sent(layer, monkeypatch, chunks, fault):
    begun, exchange = [], torch.distributed.all_to_all_single
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *a, **k: begun.append(1) or exchange(*a, **k))
    layer.run(layer.plans(chunks))
    assert len(begun) == 6 * chunks, "the witness sees none"
    begun.clear()
    opened, hidden = layer.pass_under(layer.plans(chunks), microbatches=2), layer.hidden
    what = {
        "another microbatch": "a microbatch that it is not running",
        "fewer rows": "differ in number.*got 14 rows, expected 13 tokens",
        "closed": "a pass that is not open",
    }[fault]
    with pytest.raises(ReplayError, match=what):
        layer.moe.router.handle = opened.handle(0)
        if fault == "closed":
            layer.moe(hidden)
        with opened:
            opened.begin_forward(int(fault == "another microbatch"), torch.arange(ROWS))
            layer.moe(hidden[1:] if fault == "fewer rows" else hidden)
    assert not begun


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_record_is_compared_before_an_expert_computes(layer, monkeypatch, chunks):
    happened, check = [], ReplayPass.check_dispatch
    monkeypatch.setattr(ReplayPass, "check_dispatch", lambda *a: happened.append("compared") or check(*a))
    layer.moe.experts.register_forward_pre_hook(lambda *a: happened.append("experts"))
    layer.run(layer.plans(chunks))
    assert happened == ["compared"] + chunks * ["experts"]


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_is_sent_is_held_against_the_record_all_the_same(layer, chunks):
    plans, router = layer.plans(chunks), layer.moe.router
    routing = router.routing
    router.routing = lambda *a, **k: (lambda probs, chosen: (probs, chosen.roll(1, -1)))(*routing(*a, **k))
    with refused(ReplayError, fault="misapplied"):
        layer.run(plans)
    router.routing = routing
    (entries,) = (plan.entries for plan in plans[0].values())
    entries[:2] = entries[:2].flip(0)
    layer.run(plans)  # reordered entries are still those of the map
    row, expert = divmod(int(entries[0]), EXPERTS)
    recorded = layer.tables[0].routes[0][row].tolist()
    entries[0] += next(other for other in range(EXPERTS) if other not in recorded) - expert
    with refused(ReplayError, fault="plan"):
        layer.run(plans)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("moe_shared_expert_overlap", True),
        ("moe_latent_size", 8),
        ("overlap_dispatch_backward_with_experts_wgrad", True),
    ],
)
def test_a_layer_that_does_more_around_its_dispatch_is_refused(one_rank, setting, value):
    layer = Layer(shared=True)
    setattr(layer.moe.config, setting, value)
    with pytest.raises(ConfigError, match=f"got {setting}={value}, expected off"):
        layer.run(layer.plans(1))
