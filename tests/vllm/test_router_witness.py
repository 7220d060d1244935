"""Tests which experts logits allow a router to choose, and how rows of a step are assigned to requests."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_rl.errors import EngineError
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.router_witness import Ranking, RouterWitness
from moe_rl.vllm.slots import Recorded, Rows

EPS = {torch.float32: torch.finfo(torch.float32).eps, torch.bfloat16: torch.finfo(torch.bfloat16).eps}


def choose(logits, ranking):
    """Choose as vLLM's grouped_topk does, in the precision of the logits."""
    scores = logits.sigmoid() if ranking.sigmoid else logits.softmax(-1)
    if ranking.bias is not None:
        scores = scores + torch.from_numpy(ranking.bias).to(logits.dtype)
    grouped = scores.view(len(scores), ranking.groups, -1)
    best = grouped.topk(2, -1).values.sum(-1) if ranking.bias is not None else grouped.amax(-1)
    kept = torch.zeros_like(best).scatter_(1, best.topk(ranking.kept, -1).indices, 1).bool()
    masked = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    return masked.topk(ranking.top_k, -1).indices


@settings(max_examples=200)
@given(st.data())
def test_what_a_router_chooses_is_allowed_and_little_else(data):
    dtype = data.draw(st.sampled_from(list(EPS)), "dtype")
    groups, kept = data.draw(st.sampled_from([(1, 1), (4, 2), (8, 4)]), "groups")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))
    scale = data.draw(st.sampled_from([0.0, 0.01, 1.0, 8.0, 200.0]), "scale")
    bias = None
    if data.draw(st.booleans(), "biased"):
        bias = data.draw(st.sampled_from([0.1, 5.0]), "bias") * torch.randn(32, generator=generator).numpy()
    ranking = Ranking(4, data.draw(st.booleans(), "sigmoid"), bias, groups, kept, 4 * EPS[dtype])
    logits = (scale * torch.randn(50, 32, generator=generator)).to(dtype)
    chosen = np.zeros((50, 32), bool)
    np.put_along_axis(chosen, choose(logits, ranking).numpy(), True, 1)
    must, may = ranking.bounds(logits.float().numpy())
    assert not (must & ~chosen).any() and not (chosen & ~may).any()
    if dtype == torch.float32 and scale == 1.0 and bias is None:
        assert (must.sum(1) == 4).mean() > 0.95 and (may == must).all(1).mean() > 0.95


def test_equal_logits_leave_every_choice_open():
    must, may = Ranking(4, False, None, 1, 1, 1e-6).bounds(np.zeros((3, 16), np.float32))
    assert not must.any() and may.all()
    must, may = Ranking(2, False, None, 1, 1, 1e-6).bounds(np.array([[3.0, 1, 1, 0]], np.float32))
    assert must.tolist() == [[True, False, False, False]] and may.tolist() == [[True, True, True, False]]


class CPURouter:
    """Stands for vLLM's router as the witness sees it."""

    scoring_func, use_grouped_topk, custom_routing_function = "softmax", False, None
    e_score_correction_bias = _hash_indices_table = None
    top_k, global_num_experts = 2, 8

    def _compute_routing(self, hidden_states, router_logits, indices_type=None):
        return None, router_logits.topk(2, -1).indices


@pytest.fixture
def worker():
    config = SimpleNamespace(speculative_config=None, model_config=SimpleNamespace(enforce_eager=True))
    return SimpleNamespace(
        vllm_config=config, model_config=SimpleNamespace(get_num_experts=lambda: 8), device=torch.device("cpu")
    )


def made(worker, stages=1, layers=(1, 3)):
    routers = {layer: CPURouter() for layer in layers}
    modules = {layer: SimpleNamespace(router=router) for layer, router in routers.items()}
    return routers, RouterWitness.of(worker, modules, pipeline_stages=stages)


def forward(routers, witness, requests, logits, seed="s"):
    """Run one step: the routers run, and the witness's data are kept."""
    tokens = sum(count for _, count in requests)
    witness.begin_step(tokens, seed)
    chosen = [router._compute_routing(None, logits[at])[1] for at, router in enumerate(routers.values())]
    witness.take(0, witness.logits().clone().numpy(), witness.whose(requests))
    return torch.stack(chosen, 1).numpy()


def request(number, forwarded, key="k"):
    ask = RecordingRequest(f"{key}{number}", "shard") if key else None
    return Recorded(number, ask, np.zeros(0, np.int32), 0, greedy=False, forwarded=forwarded)


def rows_of(routes):
    return Rows(routes, *[np.zeros(len(routes), np.int64)] * (len(Rows.__dataclass_fields__) - 1))


def test_rows_are_followed_to_their_requests(worker):
    """40 tokens: 5 after 3 of one request, 30 of a prompt, 1 that is not recorded, 4 of another prompt."""
    routers, witness = made(worker)
    logits = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    old, long, free, short = request(0, 8), request(1, 30), request(2, 9, key=""), request(3, 4)
    routes = forward(routers, witness, [(old, 5), (long, 30), (free, 1), (short, 4)], logits)
    before = np.zeros((3, 2, 2), np.int64)
    counts = []
    for one, part in ((old, np.concatenate([before, routes[:5]])), (long, routes[5:35]), (short, routes[36:])):
        counts.append(witness.check(one, rows_of(part)))
    assert sum(counts) in (12, 13, 14) and counts[1] == 10 and all(counts)
    assert witness.check(long, rows_of(routes[5:35])) == 0  # what was checked is forgotten


def test_rows_of_another_layer_or_token_are_named(worker):
    routers, witness = made(worker)
    logits = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(1))
    for wrong, said in ((lambda r: r[:, ::-1], "layer 1"), (lambda r: np.roll(r, 1, 0), "position 0, layer 1"),
                        (lambda r: np.concatenate([r[:, :1], 0 * r[:, 1:] + [0, 1]], 1), "layer 3")):  # fmt: skip
        one = request(5, 12)
        routes = forward(routers, witness, [(one, 12)], logits)
        with pytest.raises(EngineError, match=f"request k5, .*{said}.*got experts .* expected 2 of"):
            witness.check(one, rows_of(wrong(routes)))


def test_what_is_computed_again_after_a_preemption_is_no_witness_of_the_first_pass(worker):
    """The first 8 of 12 rows were kept at the preemption, and nobody had seen their logits."""
    routers, witness = made(worker)
    first, again = torch.randn(2, 2, 12, 8, generator=torch.Generator().manual_seed(2))
    kept = forward(routers, witness, [(request(4, 12), 12)], first)[:8]
    one = request(5, 12)
    one.kept = rows_of(kept)
    routes = forward(routers, witness, [(one, 12)], again)
    assert (routes[:8] != kept).any()
    assert witness.check(one, rows_of(np.concatenate([kept, routes[8:]]))) == 4


def test_a_router_that_was_not_called_and_a_part_of_a_step_say_nothing(worker):
    routers, witness = made(worker)
    one = request(0, 6)
    logits = torch.randn(2, 6, 8)
    witness.begin_step(6, "s")
    routers[1]._compute_routing(None, logits[0])
    witness.take(0, witness.logits().numpy(), witness.whose([(one, 6)]))
    routes = np.zeros((6, 2, 2), np.int64)
    assert witness.check(one, rows_of(routes)) == 0
    witness.begin_step(6, "s")
    for router in routers.values():
        router._compute_routing(None, logits[0, :3])
    witness.take(0, witness.logits().numpy(), witness.whose([(one, 6)]))
    assert witness.check(one, rows_of(routes)) == 0


def test_it_is_off_where_it_cannot_be(worker):
    assert made(worker)[1] is not None
    assert made(worker, stages=2)[1] is None and made(worker, layers=())[1] is None
    for name, value in (("custom_routing_function", len), ("scoring_func", "sqrtsoftplus"), ("_hash_indices_table", 1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CPURouter, name, value)
            assert made(worker)[1] is None
    worker.vllm_config.model_config.enforce_eager = False
    assert made(worker)[1] is None
