"""A multi-token-prediction layer beside the decoder: its router has the same number as the decoder's first layer, and
must not be mistaken for it."""

import dataclasses
from itertools import accumulate

import torch

from moe_rl.config.training import ParallelConfig
from moe_rl.replay.replay_pass import ReplayPass
from tests.megatron.models import TRAIN, facts, table
from tests.support.operations import Operations

T = 12


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build(**changes):
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from moe_rl.megatron.model import transformer_config
    from moe_rl.megatron.specs import replay_spec

    style = facts()
    config = transformer_config(style, TRAIN, ParallelConfig())
    settings = {"mtp_num_layers": 1, "perform_initialization": True, "init_method_std": 0.3}
    config = dataclasses.replace(config, **settings | changes)
    spec = replay_spec(config)
    torch.manual_seed(0)
    return GPTModel(
        config,
        spec,
        vocab_size=style.vocab,
        max_sequence_length=64,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=HAVE_TE),
    )


def run(model, routes, *, again=False, lengths=(T,)):
    """Run a training pass on random tokens of sequences of these lengths; return what the pass showed."""
    from moe_rl.megatron.router import ReplaySeqParams

    torch.manual_seed(1)
    tokens, positions = torch.randint(0, 96, (1, T)), torch.arange(T)[None]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    layers = frozenset(routes) if again else frozenset()
    opened = ReplayPass(
        [table(routes, 12)], tuple(routes), mode="replay", name="test", rank=0, recomputed_layers=layers
    )
    with opened:
        opened.begin_forward(0, opened.microbatches[0].fed.tokens)
        params = ReplaySeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=T, max_seqlen_kv=T,
            lengths=lengths, tokens=T, replay=opened.handle(0),
        )  # fmt: skip
        loss = model(tokens, positions, None, labels=tokens, loss_mask=torch.ones(1, T), packed_seq_params=params)
        loss.sum().backward()
    return opened.seen


def test_recomputation_over_packed_sequences_changes_no_gradient(one_rank):
    """Earlier versions of Megatron crashed here; this setting no longer needs a refusal."""
    routes = {layer: torch.rand(T, 12).argsort(-1)[:, :4] for layer in (0, 1)}
    plain, recomputed = build(), build(**FULL)
    recomputed.load_state_dict(plain.state_dict())
    assert run(plain, routes).tally.consumed == 2
    assert run(recomputed, routes, again=True).tally.consumed == 4
    ours = {name: p.grad for name, p in recomputed.named_parameters() if p.grad is not None}
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() and any("mtp" in name for name in ours)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_more_sequences_take_no_more_operations(one_rank):
    routes, counts = {layer: torch.rand(T, 12).argsort(-1)[:, :4] for layer in (0, 1)}, []
    model = build(mtp_num_layers=None)
    run(model, routes)  # Megatron keeps the angles of a length
    for lengths in ((T // 2,) * 2, (T // 6,) * 6):
        with Operations() as operations:
            run(model, routes, lengths=lengths)
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_its_router_chooses_while_the_decoder_replays(one_rank):
    from moe_rl.megatron.router import ReplayRouter

    model = build()
    decoder = [layer.mlp.router for layer in model.decoder.layers]
    (behind,) = [m for m in model.modules() if isinstance(m, ReplayRouter) and m not in decoder]
    # Megatron numbers these layers like those of the decoder.
    assert behind.layer_number == decoder[0].layer_number == 1 and behind.is_mtp_layer

    maps, choices = {}, {}

    def look(router, inputs, output):
        maps[router] = output[1]
        choices[router] = torch.zeros_like(output[1]).scatter(1, router.gating(inputs[0])[:, 0].topk(4, -1)[1], True)

    for router in (*decoder, behind):
        router.register_forward_hook(look)
    routes = {layer: torch.rand(T, 12).argsort(-1)[:, :4] for layer in (0, 1)}
    opened = run(model, routes)
    assert opened.tally.consumed == opened.tally.expected == 2

    for layer, router in enumerate(decoder):
        recorded = torch.zeros_like(maps[router]).scatter(1, routes[layer], True)
        assert torch.equal(maps[router], recorded) and not torch.equal(maps[router], choices[router])
    assert torch.equal(maps[behind], choices[behind])
    assert behind.weight.grad.abs().max() > 0
