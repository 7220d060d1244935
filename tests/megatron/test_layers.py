"""Compares layers that have their own backward pass with the operations that they stand for."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from moe_rl.planning.packing import rows_of
from tests.megatron.models import TRAIN, facts


@pytest.mark.parametrize("size", [8, 4], ids=["whole", "partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_their_gradients_are_rotated_as_by_megatron(size, dtype):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from moe_rl.megatron.layers import _Rotation

    angles = (torch.rand(37, 1, 1, size // 2) * 100).repeat(1, 1, 1, 2)
    cos, sin = ((of(angles) * 1.1).to(dtype) for of in (torch.cos, torch.sin))
    rows, weight = torch.randn(2, 37, 1, 3, 8).to(dtype)
    seen = []
    for rotate in (
        lambda rows: _Rotation.apply(rows, cos, sin),
        lambda rows: _apply_rotary_pos_emb_bshd(rows, angles, mscale=1.1),
    ):
        given = rows.clone().requires_grad_()
        rotated = rotate(given)
        (gradient,) = torch.autograd.grad(rotated, given, weight)
        seen.append((rotated, gradient))
    ours, theirs = seen
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert not torch.equal(ours[0], rows)


@pytest.mark.parametrize("shape", [(37, 1, 16), (37, 1, 3, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_normed_as_by_torch(shape, dtype):
    """So are their gradients, up to rounding."""
    from moe_rl.megatron.layers import _Norm

    x, out = torch.randn(2, *shape).to(dtype)
    weight, seen = torch.rand(shape[-1]).to(dtype), []
    for norm in (
        lambda x, weight: _Norm.apply(x, weight, 1e-6),
        lambda x, weight: F.rms_norm(x, shape[-1:], weight, 1e-6),
    ):
        given = [one.clone().requires_grad_() for one in (x, weight)]
        normed = norm(*given)
        seen.append((normed, *torch.autograd.grad(normed, given, out)))
    (ours, of_x, of_weight), (theirs, its_x, its_weight) = seen
    assert torch.equal(ours, theirs) and of_x.dtype == of_weight.dtype == dtype
    torch.testing.assert_close(of_x, its_x)
    torch.testing.assert_close(of_weight, its_weight)


def test_the_gradients_of_a_norm_are_exact():
    from moe_rl.megatron.layers import _Norm

    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 2, 8), (8,)))
    torch.autograd.gradcheck(lambda x, weight: _Norm.apply(x, weight, 1e-6), (x, weight))
    torch.autograd.gradcheck(lambda x: _Norm.apply(x, weight.detach(), 1e-6), (x,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_that_their_layer_does_not_mark_are_those_of_a_ranks_own_heads(one_rank, monkeypatch, dtype):
    """TransformerEngine's layer does not. Weights are summed up and gradients counted on all tensor-parallel ranks."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

    from moe_rl.config.training import ParallelConfig
    from moe_rl.megatron import layers, model
    from moe_rl.megatron.live_weights import _is_cut

    monkeypatch.setattr(layers, "set_tensor_model_parallel_attributes", lambda *_, **__: None)
    monkeypatch.setattr(model.hf_map, "load", lambda *_: None)
    ours, train = facts(sinks=True, qk_norm=False), TRAIN.model_copy(update={"dtype": dtype})
    chunk = model._build_chunk(ours, model.transformer_config(ours, train, ParallelConfig()), None, None)
    sinks = [values for name, values in chunk.named_parameters() if name.endswith("softmax_offset")]
    second = SimpleNamespace(rank=lambda: 1)
    assert len(sinks) == 2
    assert all(_is_cut(values) and param_is_not_tensor_parallel_duplicate(values, second) for values in sinks)


HEADS, KEYS, SIZE = 4, 2, 8
UNEVEN, EVEN = (48, 4, 8, 12, 4, 4), (16, 12, 12, 16)


class Rank:
    """Stands for a process group."""

    def __init__(self, rank=0, ranks=1):
        self.rank, self.size = lambda: rank, lambda: ranks


@pytest.fixture
def attend(monkeypatch):
    """Returns output and gradients of packed attention on all context-parallel ranks together, in the order of the run,
    and the shapes of the queries of each product."""
    from moe_rl.megatron import layers

    product, shapes = F.scaled_dot_product_attention, []

    def seen(query, *args, **kwargs):
        shapes.append((query.shape[0], query.shape[2]))
        return product(query, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)

    def run(lengths, ranks=1, window=None, softmax="vanilla"):
        torch.manual_seed(0)
        layers._slots.cache_clear()
        shapes.clear()
        query, key, value, weight = (torch.randn(sum(lengths), heads, SIZE) for heads in (HEADS, KEYS, KEYS, HEADS))
        given = [tensor.requires_grad_() for tensor in (query, key, value)]
        config = SimpleNamespace(
            kv_channels=SIZE, window_size=window, window_attn_skip_freq=None, softmax_type=softmax,
            num_attention_heads=HEADS, params_dtype=torch.float32, attention_dropout=0.0,
        )  # fmt: skip
        own = [torch.from_numpy(rows_of(lengths, rank, ranks)) for rank in range(ranks)]
        everyone = torch.cat(own)
        gathered = torch.cat((key, value), -1)[everyone]
        monkeypatch.setattr(layers, "gather_from_sequence_parallel_region", lambda rows, group: gathered)
        outs = []
        for rank, rows in enumerate(own):
            groups = SimpleNamespace(cp=Rank(rank, ranks), tp=Rank())
            attention = layers.PackedAttention(config, 1, None, "self", pg_collection=groups)
            if attention.softmax_offset is not None:
                torch.nn.init.ones_(attention.softmax_offset)
            packed = SimpleNamespace(qkv_format="thd", lengths=lengths)
            outs.append(attention(query[rows], key[rows], value[rows], packed_seq_params=packed))
        out = torch.cat(outs)[everyone.argsort()]
        gradients = torch.autograd.grad(out, given, weight.flatten(1))
        return (out, *gradients), shapes.copy(), (query, key, value)

    return run


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [{}, {"window": (5, 0)}, {"softmax": "learnable"}], ids=["full", "window", "sinks"])
def test_sequences_of_different_lengths_attend_in_rectangles_of_at_most_twice_their_rows(
    attend, monkeypatch, ranks, kind
):
    from moe_rl.megatron import layers

    ours, shapes, _ = attend(UNEVEN, ranks, **kind)
    assert sum(sequences * width for sequences, width in shapes) < 2 * sum(UNEVEN) and len(shapes) == 3 * ranks
    monkeypatch.setattr(layers, "alike", lambda lengths: [list(range(len(lengths)))])
    padded, shapes, _ = attend(UNEVEN, ranks, **kind)
    assert shapes == [(len(UNEVEN), max(UNEVEN) // ranks)] * ranks
    for part, other in zip(ours, padded, strict=True):
        torch.testing.assert_close(part, other)


def test_sequences_of_similar_lengths_attend_in_one_rectangle(attend):
    """Bit for bit as in a rectangle that is padded here."""
    (out, *_), shapes, rows = attend(EVEN)
    assert shapes == [(4, 16)]
    query, key, value = (
        torch.nn.utils.rnn.pad_sequence(part.split(EVEN), batch_first=True).transpose(1, 2) for part in rows
    )
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)
    alone = [part[:length].flatten(1) for part, length in zip(expected, EVEN, strict=True)]
    assert torch.equal(out, torch.cat(alone))
