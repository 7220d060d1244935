"""What the router computes from recorded experts, in every style: weights and gradients compared with plain torch in
float64.

Legend: T tokens, E experts, K experts per token.
"""

from types import SimpleNamespace

import pytest
import torch

from moe_rl.config.training import ParallelConfig
from moe_rl.replay.replay_pass import MicrobatchHandle, Watch
from tests.megatron.models import TRAIN, facts

T, E, K = 10, 12, 4
SIGMOID = {"score_function": "sigmoid"}
GROUPS = {"groups": 4, "top_groups": 2}
STYLES = {
    "softmax over the chosen": {},
    "softmax over all": {"norm_topk_prob": False},
    "softmax over all, groups, scaling": {"norm_topk_prob": False, "routed_scaling": 16.0} | GROUPS,
    "sigmoid": SIGMOID,
    "sigmoid, bias": SIGMOID | {"expert_bias": True},
    "sigmoid, bias, groups, scaling": SIGMOID | {"expert_bias": True, "routed_scaling": 2.5} | GROUPS,
}


GROUPED = [name for name, changes in STYLES.items() if "groups" in changes]
BIASED = [name for name, changes in STYLES.items() if "expert_bias" in changes]


@pytest.fixture(params=STYLES)
def style(request):
    return facts(num_experts=E, top_k=K, **STYLES[request.param])


@pytest.fixture
def router(one_rank, style):
    from megatron.core.transformer.moe.moe_layer import get_default_pg_collection

    from moe_rl.megatron.model import transformer_config
    from moe_rl.megatron.router import ReplayRouter, ReplaySeqParams

    torch.manual_seed(3)
    router = ReplayRouter(transformer_config(style, TRAIN, ParallelConfig()), get_default_pg_collection())
    router.set_layer_number(1)
    router.seq_params = ReplaySeqParams(lengths=(T,), tokens=T, padding=torch.zeros(T, dtype=torch.bool))
    with torch.no_grad():
        router.weight.normal_(0, 0.5)
        if style.expert_bias:
            router.expert_bias.normal_(0, 0.3)
    return router


def weights(style, logits, routes):
    """Return [T, E] float64 by the model's definition, given the chosen experts."""
    logits = logits.double()
    if style.score_function == "softmax":
        scores = logits.softmax(-1).gather(1, routes)
    else:
        scores = logits.sigmoid().gather(1, routes)
    if style.norm_topk_prob:
        scores = scores / scores.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(1, routes, scores * style.routed_scaling)


def route(router, hidden, replay):
    """Return weights [T, E], map [T, E], and the gradient of a random function of the weights for the router's
    weight."""
    router.handle = None if replay is None else MicrobatchHandle(replay, 0)
    router.weight.grad = None
    probs, routing_map = router(hidden)
    (probs * random_like(probs)).sum().backward()
    return probs.detach(), routing_map, router.weight.grad


def random_like(probs):
    return torch.randn(probs.shape, generator=torch.Generator().manual_seed(5))


def replaying(routes):
    """Stand in for a pass with these routes, with the methods that a router calls."""
    return SimpleNamespace(
        mode="replay",
        watch=Watch(),
        take=lambda *key: routes,
        native_rows=lambda microbatch: None,
        observe_logits=lambda *key: None,
    )


def unlikely(router, hidden):
    """Return [T, K], the experts with the lowest logits, which the router would never choose."""
    return router.gating(hidden)[:, 0].detach().topk(K, -1, largest=False)[1]


def test_weights_and_gradients_of_experts_far_from_the_live_ones(router, style):
    hidden = torch.randn(T, 1, style.hidden_size)
    routes = unlikely(router, hidden)
    live = route(router, hidden, None)[1]
    assert (torch.zeros_like(live).scatter(1, routes, True) & live).float().mean() < 0.1

    probs, routing_map, gradient = route(router, hidden, replaying(routes))
    assert torch.equal(routing_map, torch.zeros_like(routing_map).scatter(1, routes, True))
    weight = router.weight.detach().double().requires_grad_()
    expected = weights(style, hidden[:, 0].double() @ weight.T, routes)
    torch.testing.assert_close(probs.double(), expected.detach(), rtol=1e-5, atol=1e-7)
    (expected * random_like(probs)).sum().backward()
    torch.testing.assert_close(gradient.double(), weight.grad, rtol=1e-4, atol=1e-6)
    # The gradient reaches the rows of experts that the router would not have chosen.
    chosen = routes.flatten().unique()
    assert (gradient[chosen].abs().amax(-1) > 1e-5).all()


@pytest.mark.parametrize("style", GROUPED, indirect=True)
def test_recorded_experts_may_come_from_any_groups(router, style):
    hidden = torch.randn(T, 1, style.hidden_size)
    size = E // style.groups
    # one expert of each group
    routes = torch.stack([torch.arange(style.groups) * size + token % size for token in range(T)])
    live = route(router, hidden, None)[1].view(T, style.groups, size).any(-1).sum(-1)
    assert (live <= style.top_groups).all()
    probs, routing_map, _ = route(router, hidden, replaying(routes))
    assert (routing_map.view(T, style.groups, size).any(-1).sum(-1) == style.groups).all()
    expected = weights(style, router.gating(hidden)[:, 0].detach(), routes)
    torch.testing.assert_close(probs.double(), expected, rtol=1e-5, atol=1e-7)


def test_the_live_choice_replayed_is_native_routing_bit_for_bit(router, style):
    class Observer:
        mode = "observe"

        def observe_native(self, microbatch, layer, native, scores):
            self.choice = native

        def observe_logits(self, microbatch, layer, logits):
            self.logits = logits.detach().view(T, -1)

    hidden = torch.randn(T, 1, style.hidden_size)
    observer = Observer()
    observed = route(router, hidden, observer)
    native = route(router, hidden, None)
    replayed = route(router, hidden, replaying(observer.choice))
    assert torch.equal(observer.logits, router.gating(hidden)[:, 0])  # before scores, bias and groups
    for other in (observed, replayed):
        assert all(torch.equal(a, b) for a, b in zip(native, other, strict=True))


@pytest.mark.parametrize("style", BIASED, indirect=True)
def test_the_bias_chooses_and_weighs_nothing(router, style):
    hidden = torch.randn(T, 1, style.hidden_size)
    routes = unlikely(router, hidden)
    native, replayed = route(router, hidden, None), route(router, hidden, replaying(routes))
    with torch.no_grad():
        router.expert_bias.normal_(0, 3.0)
    assert not torch.equal(route(router, hidden, None)[1], native[1])
    assert all(torch.equal(a, b) for a, b in zip(route(router, hidden, replaying(routes)), replayed, strict=True))


@pytest.mark.parametrize("style", BIASED, indirect=True)
def test_the_load_leaves_padding_and_passes_without_gradient_out(router, style):
    hidden = torch.randn(T, 1, style.hidden_size)
    routes = unlikely(router, hidden)
    router.seq_params.padding = torch.arange(T) >= 7
    route(router, hidden, replaying(routes))
    counted = routes[:7].flatten().bincount(minlength=E)
    assert torch.equal(router.local_tokens_per_expert, counted.float())
    with torch.no_grad():
        router(hidden)
    assert torch.equal(router.local_tokens_per_expert, counted.float())


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_without_a_policy_a_balancing_loss_is_megatrons(one_rank, kind):
    from megatron.core.transformer.moe.moe_layer import get_default_pg_collection
    from megatron.core.transformer.moe.router import TopKRouter

    from moe_rl.megatron.model import transformer_config
    from moe_rl.megatron.router import ReplayRouter, ReplaySeqParams

    config = transformer_config(facts(num_experts=E, top_k=K), TRAIN, ParallelConfig())
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff = kind, 0.1
    hidden, gradients = torch.randn(T, 1, config.hidden_size), []
    for make in (TopKRouter, ReplayRouter):
        router = make(config, get_default_pg_collection())
        router.set_layer_number(1)
        router.seq_params = ReplaySeqParams(lengths=(T,), tokens=T, padding=torch.zeros(T, dtype=torch.bool))
        with torch.no_grad():
            router.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
        router(hidden)[0].sum().mul(0.0).backward()
        gradients.append(router.weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_router_asks_for_its_own_layer_and_chooses_for_rows_without_a_route(router, style):
    hidden = torch.randn(T, 1, style.hidden_size)
    routes, missing = unlikely(router, hidden), torch.arange(T) % 3 == 0
    live, asked = route(router, hidden, None)[1], []
    router.set_layer_number(4)
    replay = replaying(routes)
    replay.take = lambda *key: asked.append(key) or routes
    replay.native_rows = lambda microbatch: missing
    replay.observe_native = lambda microbatch, layer, native, scores: asked.append((microbatch, layer))
    replayed = torch.zeros_like(live).scatter(1, routes, True)
    assert torch.equal(route(router, hidden, replay)[1], torch.where(missing[:, None], live, replayed))
    assert asked == [(0, 3, T), (0, 3)]  # layers are counted from 0, Megatron's from 1


def test_a_group_is_as_good_as_its_two_best_experts_together():
    from moe_rl.replay.choice import of_best_groups

    scores = torch.tensor([[0.9, 0.0, 0.1, 0.6, 0.5, 0.0], [0.2, 0.2, 0.2, 0.1, 0.1, 0.9]])
    allowed = of_best_groups(scores, 2, 1)
    assert torch.equal(allowed.isfinite(), torch.tensor([[False] * 3 + [True] * 3] * 2))
    assert torch.equal(allowed[:, 3:], scores[:, 3:])
