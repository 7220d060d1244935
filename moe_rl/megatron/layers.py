"""Provides torch versions of the layers that megatron-core takes from TransformerEngine: RMSNorm under sequence
parallelism, linear layers that are whole on every rank, all experts of a rank at once, and causal attention and rotary
embedding over packed sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch.autograd.function import once_differentiable

from moe_rl.megatron.adapters import Adapter, of_experts
from moe_rl.megatron.copied_experts import receive_copies
from moe_rl.megatron.dispatcher import FlexDispatcher, PlannedDispatcher
from moe_rl.objectives.device import to_device
from moe_rl.planning.packing import alike, positions_of


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose weight is marked for Megatron's sequence-parallel gradient sum."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Norm.apply(x, self.weight.to(x.dtype), self.eps)


class _Norm(torch.autograd.Function):
    """Computes torch's rms_norm of [..., H]. Its backward on a CPU would take twice as long: it goes back through each
    operation of the forward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        x, weight, scale = ctx.saved_tensors  # scale [..., 1] is in float32 at least, and so is all that follows
        unit, wide = x * scale, weight.to(scale.dtype)
        along = (unit * gradient).flatten(0, -2)
        mean = (along.mv(wide) / len(wide)).view(scale.shape)
        of_x = torch.addcmul(gradient * wide, unit, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), along.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None


class WholeLinear(torch.nn.Linear):
    """Implements a linear layer without bias whose weight is whole on every tensor-parallel rank: [rows, 1, inputs] ->
    [rows, 1, outputs].

    A rank has only the gradient of its own rows, so the weight is marked for the sum over ranks.
    """

    def __init__(self, config, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return super().forward(x), None


class ExpertOutput(RowParallelLinear):
    """Computes the output projection of an expert, which may have a bias.

    Megatron's torch linear layer does not support that bias: it adds the bias in place to what autograd considers a
    view of another tensor, and marks it to be summed over tensor-parallel ranks, which hold different experts.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.bias is not None:
            self.bias.sequence_parallel = False

    def forward(self, input_):
        output, bias = super().forward(input_)
        return (output if bias is None else output.clone()), bias


class GroupedExperts(SequentialMLP):
    """Computes all experts of a rank at once, except for their matrix products. The experts have no biases.

    Megatron runs one expert after the other. The host then takes longer for an expert than the product of a few rows
    does. All values are the same bit for bit: each product has the same rows, and all else is computed element by
    element or row by row.

    Attributes:
        dispatcher: The layer's, which says in `copies` which experts of other ranks this rank computes too.
    """

    dispatcher: FlexDispatcher | PlannedDispatcher

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        rows, counts, experts = permuted_local_hidden_states, tokens_per_expert.tolist(), self.local_experts
        matrices = [[expert.linear_fc1.weight for expert in experts], [expert.linear_fc2.weight for expert in experts]]
        if (copies := self.dispatcher.copies) is not None:
            rows, received = receive_copies(rows, copies, matrices, self.ep_group)
            matrices = [own + others for own, others in zip(matrices, received, strict=True)]
            held = np.flatnonzero(copies[self.ep_group.rank()] >= 0)
            counts = counts[: len(experts)] + [counts[len(experts) + slot] for slot in held]
        everyone = SimpleNamespace(
            config=self.config,
            activation_func=experts[0].activation_func,
            linear_fc1=_ExpertProducts(counts, matrices[0], _adapters([expert.linear_fc1 for expert in experts])),
            linear_fc2=_ExpertProducts(counts, matrices[1], _adapters([expert.linear_fc2 for expert in experts])),
        )
        return MLP.forward(everyone, rows, permuted_probs)


class _ExpertProducts(torch.nn.Module):
    """Stands for the linear layers of all experts, which keep their parameters and adapters."""

    def __init__(self, counts: list[int], matrices: list[torch.Tensor], adapters: Seq[Adapter]):
        super().__init__()
        self.counts, self.matrices, self._adapters = counts, matrices, adapters

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        products = _RowsTimesMatrices.apply(rows, self.counts, *self.matrices)
        if self._adapters:
            scale, downs, ups = of_experts(self._adapters)
            low = _RowsTimesMatrices.apply(rows, self.counts, *downs) * scale
            products = products + _RowsTimesMatrices.apply(low, self.counts, *ups)
        return products, None


def _adapters(layers: Seq[torch.nn.Module]) -> Seq[Adapter]:
    """Return the adapters of the experts' layers, none if they are off."""
    return [layer.lora for layer in layers if hasattr(layer, "lora") and layer.lora.on]


class _RowsTimesMatrices(torch.autograd.Function):
    """Multiplies the rows of each expert, `counts` of [R, I] one after the other, by its matrix [O, I]."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, counts: list[int], *matrices: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, *matrices)
        ctx.counts = counts
        products = rows.new_empty(len(rows), len(matrices[0]))
        with torch._C.DisableTorchFunction():  # nothing in the loop needs the modes of a backend
            for part, matrix, product in zip(rows.split(counts), matrices, products.split(counts), strict=True):
                torch.mm(part, matrix.t(), out=product)
        return products

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        rows, *matrices = ctx.saved_tensors
        of_rows, of_matrices, trained = torch.empty_like(rows), [], ctx.needs_input_grad[2:]
        with torch._C.DisableTorchFunction():
            cut = (tensor.split(ctx.counts) for tensor in (rows, gradient, of_rows))
            for part, of_product, of_part, matrix, learns in zip(*cut, matrices, trained, strict=True):
                torch.mm(of_product, matrix, out=of_part)
                of_matrices.append(of_product.t().mm(part) if learns else None)
        return of_rows, None, *of_matrices


class PackedSelfAttention(SelfAttention):
    """Extends SelfAttention: it rotates all sequences of a packed run at once.

    In every layer Megatron would cut the angles sequence by sequence, and the host would wait for the device each time.
    The angles that Megatron's embedding hands over are those of the longest sequence, [longest, 1, 1, d]; None if the
    model rotates nothing.
    """

    def forward(self, *args, rotary_pos_emb: torch.Tensor | None, packed_seq_params, **kwargs):
        context, lengths, unrotated = self.pg_collection.cp, packed_seq_params.lengths, self.config.no_rope_freq
        self._angles = None
        if rotary_pos_emb is not None and not (unrotated and unrotated[self.layer_number - 1]):
            positions = _positions(lengths, context.rank(), context.size(), rotary_pos_emb.device)
            self._angles = rotary_pos_emb.index_select(0, positions)
        result = super().forward(*args, rotary_pos_emb=None, packed_seq_params=packed_seq_params, **kwargs)
        self._angles = None  # else every layer that is recomputed would keep them
        return result

    def get_query_key_value_tensors(self, *args, **kwargs):
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        return *((query, key) if self._angles is None else self._rotated(query, key)), *rest

    def _rotated(self, *several: torch.Tensor) -> list[torch.Tensor]:
        """Rotate [T, 1, heads, d] each. Without sequence boundaries, row n gets angle n."""
        angles, scale, config = self._angles, self._yarn_concentration_factor, self.config
        if config.apply_rope_fusion or config.rotary_interleaved:
            settings = {"config": config, "mscale": scale, "cp_group": self.pg_collection.cp}
            return [apply_rotary_pos_emb(rows, angles, **settings) for rows in several]
        cos, sin = ((of(angles) * scale).to(several[0].dtype) for of in (torch.cos, torch.sin))
        return [_Rotation.apply(rows, cos, sin) for rows in several]


class _Rotation(torch.autograd.Function):
    """Rotates the first r dimensions of rows [T, 1, heads, d], given cos and sin [T, 1, 1, r], of which both halves are
    equal. The values are Megatron's, bit for bit, which passes over the rows twice as often."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(rows, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, -sin), None, None


def _rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    size = cos.shape[-1]
    turned, rest = rows[..., :size], rows[..., size:]
    result = turned * cos
    (first, second), (x, y), half = turned.chunk(2, -1), result.chunk(2, -1), sin[..., : size // 2]
    x.sub_(second * half)
    y.add_(first * half)
    return torch.cat((result, rest), -1) if rest.shape[-1] else result


@lru_cache(maxsize=8)  # every layer of a microbatch asks for the same result
def _positions(lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Return the position of each row of a context-parallel rank in its sequence, [rows]."""
    return to_device(np.concatenate([positions_of(n, rank, ranks) for n in lengths]), device)


class PackedAttention(torch.nn.Module):
    """Computes core attention for packed sequences (qkv_format "thd"): causal within each sequence, none between
    sequences.

    Maps q [T, heads, d], k and v [T, groups, d] to [T, heads * d]. Under context parallelism T counts this rank's rows,
    and k and v of the other ranks are gathered.

    With config.window_size (w, 0), a token sees itself and the w tokens before it, all of them if w is -1, in the
    layers of window_attn_skip_freq. With softmax_type "learnable" (attention sinks), `softmax_offset` is one logit per
    head that takes part in the softmax but has no value.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        pg_collection=None,
        **unused,
    ):
        super().__init__()
        self.softmax_scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.context, self.tensor = pg_collection.cp, pg_collection.tp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed and config.window_size[0] >= 0 else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self.tensor.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"PackedAttention does not support dropout: got {dropout}, expected 0")

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention needs packed sequences: pass PackedSeqParams(qkv_format='thd')")
        # Causal attention never looks at later tokens. So sequences that are padded at their end to a rectangle attend
        # as if alone, those of similar lengths in one call. The cost is the memory of the rectangles;
        # TransformerEngine's kernels read the packed run directly.
        ranks = self.context.size()
        slots, key_slots, groups = _slots(packed_seq_params.lengths, self.context.rank(), ranks, query.device)
        if ranks > 1:
            # Gather both at once. In the backward, each rank receives the sum of the gradients for its rows.
            rows = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=self.context)
            key, value = rows.chunk(2, -1)

        def rectangles(t, slots, times=1):  # [rows, heads, d] -> [B, heads, width * times, d] of each group
            sizes = [positions.numel() * times for positions in groups]
            padded = t.new_zeros(sum(sizes), *t.shape[1:]).index_copy(0, slots, t)
            parts = padded.split(sizes) if len(sizes) > 1 else [padded]  # the backward of a split copies
            shaped = (part.view(len(b), -1, *t.shape[1:]) for part, b in zip(parts, groups, strict=True))
            return [part.transpose(1, 2) for part in shaped]

        rows = rectangles(query, slots), rectangles(key, key_slots, ranks), rectangles(value, key_slots, ranks)
        outs = [self._attend(*group) for group in zip(*rows, groups, strict=True)]
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return out.index_select(0, slots).flatten(1)

    def _attend(self, query, key, value, positions):
        """Return [B * width, heads, d] for queries [B, heads, width, d] at positions [B, width] of their sequences. The
        keys and values are those of the whole sequences."""
        longest = key.shape[2]
        if self.context.size() == 1 and self.window is None and self.softmax_offset is None:
            mask = {"is_causal": True}
        else:
            before = positions[:, None, :, None] - torch.arange(longest, device=query.device)
            attended = before >= 0 if self.window is None else (before >= 0) & (before < self.window)
            mask = {"attn_mask": attended}  # [B, 1, longest / ranks, longest]
        dimensions = query.shape[-1]
        if self.softmax_offset is not None:
            query, key, value, mask = self._with_sink(query, key, value, mask)
        out = F.scaled_dot_product_attention(query, key, value, **mask, enable_gqa=True, scale=self.softmax_scale)
        return out[..., :dimensions].transpose(1, 2).flatten(0, 1)

    def _with_sink(self, query, key, value, mask):
        """Add one key that every query sees, with value 0, and one dimension in which only this key is not 0.

        In that dimension the query is set so that its product with the key is the head's sink logit. Nothing else
        changes.
        """
        logits = (self.softmax_offset / self.softmax_scale)[None, :, None, None].to(query.dtype)
        query = torch.cat((query, logits.expand(*query.shape[:-1], 1)), -1)
        key, value = F.pad(key, (0, 1, 0, 1)), F.pad(value, (0, 1, 0, 1))
        key[..., -1, -1] = 1
        return query, key, value, {"attn_mask": F.pad(mask["attn_mask"], (0, 1), value=True)}

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """Describe how ranks split the sink logits: each holds those of its heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tensor,
            dp_cp_group=metadata["dp_cp_group"],
        )


@lru_cache(maxsize=8)  # every layer of a microbatch asks for the same result
def _slots(
    lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the places of rows in the rectangles of all groups of `packing.alike`, one rectangle after the other. B
    sequences of a group are each padded to its longest.

    Returns:
        The places of this context-parallel rank's T queries, [T], in rectangles 1/ranks as wide.
        The places of the keys, [T * ranks], ordered by rank.
        Each query's position, [B, width] for each group; 0 where there is no query.
    """
    begins, groups, end = dict[int, int](), list[np.ndarray](), 0
    for group in alike(lengths):
        positions = np.zeros((len(group), max(lengths[i] for i in group) // ranks), np.int64)
        for row, i in zip(positions, group, strict=True):
            row[: lengths[i] // ranks] = positions_of(lengths[i], rank, ranks)
            begins[i], end = end, end + len(row)
        groups.append(positions)
    queries = [begins[i] + np.arange(n // ranks) for i, n in enumerate(lengths)]
    keys = [begins[i] * ranks + positions_of(n, r, ranks) for r in range(ranks) for i, n in enumerate(lengths)]
    queries, keys = (to_device(np.concatenate(part), device) for part in (queries, keys))
    return queries, keys, [to_device(positions, device) for positions in groups]


class PackedRotaryEmbedding(torch.nn.Module):
    """Computes the rotary angles of latent attention for a packed run, with positions counted from 0 in every sequence.

    Megatron's own forward gives angles up to the longest sequence, and its unfused rope then rotates one sequence at a
    time. YaRN's angles come with a scaling factor, as in Megatron.

    Args:
        angles: Megatron's embedding.
    """

    def __init__(self, angles: RotaryEmbedding):
        super().__init__()
        self.angles = angles

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params=None, **unused
    ) -> tuple[int, ...]:
        return packed_seq_params.lengths

    def forward(
        self, lengths: tuple[int, ...], offset: int = 0, packed_seq: bool = True, cp_group=None
    ) -> torch.Tensor | tuple[torch.Tensor, float]:
        embedding = self.angles.get_emb(max(lengths), offset)
        angles, *size = embedding if isinstance(embedding, tuple) else (embedding,)  # [longest, 1, 1, d]
        packed = angles.index_select(0, _positions(lengths, 0, 1, angles.device))
        return (packed, *size) if size else packed


class LatentAttention(MLASelfAttention):
    """Extends MLASelfAttention: it rotates packed sequences, and has exactly the norms in its spec.

    Megatron decides about the norms with one switch, which does not fit a model without a query down-projection
    (Moonlight): with TransformerEngine it would get a second norm on the queries, and without it an error.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = PackedRotaryEmbedding(self.rotary_pos_emb)

    def _resolve_qk_norm_config(self, submodules):
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class TorchLatentAttention(LatentAttention):
    """Extends LatentAttention: its down-projections are whole on every tensor-parallel rank, as with TransformerEngine.

    Megatron's torch linear layer splits them and gathers the result. The rotary key, which all heads share, then loses
    the gradients of heads on other ranks, because the gather returns to each rank only a part of its own gradient.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = self.config
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, rows)
