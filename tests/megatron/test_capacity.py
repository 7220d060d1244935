"""A capacity computed from known routes, in Megatron's static-shape mode: nothing is dropped, and results are the
same."""

import dataclasses

import numpy as np
import pytest
import torch

from moe_rl.config.training import ParallelConfig
from moe_rl.planning.peaks import budget
from tests.megatron.models import TRAIN, facts

T, E, K, H = 40, 12, 4, 16


def computed(config, hidden, seed=5):
    """Return the output, the rows per expert as they arrive, the routing map, and the gradients of one MoE layer."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.transformer.moe.moe_layer import get_default_pg_collection

    build = get_mlp_module_spec_for_backend(LocalSpecProvider(), num_experts=E)
    layer = build(config=config, pg_collection=get_default_pg_collection(), layer_number=1)
    torch.manual_seed(seed)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    seen, dispatcher = {}, layer.token_dispatcher
    preprocess, postprocess = dispatcher.dispatch_preprocess, dispatcher.dispatch_postprocess
    dispatcher.dispatch_preprocess = lambda h, m, p: seen.update(map=m, probs=p.detach()) or preprocess(h, m, p)

    def arrived(*given):
        rows, counts, probs = postprocess(*given)
        seen["counts"] = torch.as_tensor(counts).tolist()
        return rows, counts, probs

    dispatcher.dispatch_postprocess = arrived
    states = hidden.clone().requires_grad_()
    output, _ = layer(states)
    (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
    gradients = {"states": states.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    return output.detach(), gradients, seen


@pytest.fixture
def dropless(one_rank):
    from moe_rl.megatron.model import transformer_config

    config = transformer_config(facts(num_experts=E, top_k=K, hidden_size=H), TRAIN, ParallelConfig())
    hidden = torch.randn(T, 1, H, generator=torch.Generator().manual_seed(3))
    return config, hidden, computed(config, hidden)


def static(config, factor):
    return dataclasses.replace(config, moe_expert_capacity_factor=factor, moe_pad_expert_input_to_capacity=True)


def test_the_peak_as_static_capacity_drops_nothing_and_changes_no_sum(dropless):
    config, hidden, (output, gradients, seen) = dropless
    counts = np.array(seen["counts"])[None, None, None]
    peak = budget(counts, expert_parallel=1, top_k=K)
    assert peak.source == T * K and peak.sent == max(seen["counts"]) > min(seen["counts"])
    again, same, shown = computed(static(config, peak.expert_capacity_factor(E)), hidden)
    assert shown["counts"] == [peak.sent] * E, "every expert has the same number of rows, whatever the routes"
    assert ((shown["probs"] > 0) == seen["map"]).all(), "dropped"
    # Rows of weight 0 fill up; matrices with another number of rows may be summed in another order.
    torch.testing.assert_close(again, output, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == same.keys() and gradients["router.weight"].abs().max() > 0.1
    for name in gradients:
        torch.testing.assert_close(same[name], gradients[name], rtol=1e-5, atol=1e-5)


def test_a_row_less_drops_one(dropless):
    config, hidden, (output, _, seen) = dropless
    peak = budget(np.array(seen["counts"])[None, None, None], expert_parallel=1, top_k=K)
    less = dataclasses.replace(peak, sent=peak.sent - 1)
    again, _, shown = computed(static(config, less.expert_capacity_factor(E)), hidden)
    assert shown["counts"] == [peak.sent - 1] * E
    dropped = seen["map"] & (shown["probs"] == 0)
    assert 0 < dropped.sum() <= E and (again - output).abs().max() > 1e-3
