"""What megatron-core takes from TransformerEngine, on torch ops: RMSNorm under sequence parallelism, causal attention
and rotary embedding over packed sequences."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

from moe_rl.planning.layout import positions_of


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose weight is marked, as megatron's own norms are, for the sequence-parallel gradient sum."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class PackedAttention(torch.nn.Module):
    """Core attention for packed sequences (qkv_format "thd"): causal within each sequence, nothing across.

    q [T, heads, d], k and v [T, groups, d] -> [T, 1, heads * d] in the layout SelfAttention expects for thd. Under
    context parallelism T are this rank's rows, and k and v of the others are gathered.
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
        self.softmax_scale = softmax_scale
        self.context = pg_collection.cp
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(f"PackedAttention has no dropout: got {dropout}, expected 0")

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None
    ):
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention needs packed sequences: pass PackedSeqParams(qkv_format='thd')")
        # Causal attention never looks at what follows: sequences padded at their end to a rectangle attend as if alone,
        # in one call. The price is memory for the rectangle; TransformerEngine's kernels read the packed run itself.
        lengths = packed_seq_params.lengths
        ranks, longest = self.context.size(), max(lengths)
        slots, key_slots, positions = _slots(lengths, self.context.rank(), ranks, query.device)
        mask = {"is_causal": True}
        if ranks > 1:
            # Of both at once: backward, each rank is sent the sum of the gradients for its rows.
            rows = gather_from_sequence_parallel_region(torch.cat((key, value), -1), group=self.context)
            key, value = rows.chunk(2, -1)
            seen = positions[:, None, :, None] >= torch.arange(longest, device=query.device)
            mask = {"attn_mask": seen}  # [B, 1, longest / ranks, longest]

        def rectangle(t, slots, width):  # [rows, heads, d] -> [B, heads, width, d]
            padded = t.new_zeros(len(lengths) * width, *t.shape[1:]).index_copy(0, slots, t)
            return padded.view(len(lengths), width, *t.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            rectangle(query, slots, longest // ranks),
            rectangle(key, key_slots, longest),
            rectangle(value, key_slots, longest),
            **mask,
            enable_gqa=True,
            scale=self.softmax_scale,
        )
        out = out.transpose(1, 2).flatten(0, 1).index_select(0, slots)  # [T, heads, d]
        return out.reshape(out.shape[0], 1, -1)


@lru_cache(maxsize=8)  # every layer of a microbatch asks for the same
def _slots(
    lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where rows go in rectangles of B sequences of the longest length, and what a query may see there.

    A context-parallel rank's T queries [T], in a rectangle 1/ranks as wide; the keys [T * ranks], one rank's behind the
    other's; each query's position [B, width], 0 where there is none.
    """
    longest = max(lengths)
    width = longest // ranks
    queries = [i * width + np.arange(n // ranks) for i, n in enumerate(lengths)]
    keys = [i * longest + positions_of(n, r, ranks) for r in range(ranks) for i, n in enumerate(lengths)]
    positions = np.zeros((len(lengths), width), np.int64)
    for row, n in zip(positions, lengths, strict=True):
        row[: n // ranks] = positions_of(n, rank, ranks)
    queries, keys = (torch.from_numpy(np.concatenate(part)).to(device) for part in (queries, keys))
    return queries, keys, torch.from_numpy(positions).to(device)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles for a whole packed run, every sequence counted from position 0.

    Megatron's own forward gives angles up to the longest sequence, and its unfused rope then rotates one sequence at a
    time. Given angles of the full length it rotates the run at once, and takes those of its rows out of it where
    context-parallel ranks share the run.
    """

    def get_rotary_seq_len(
        self, inference_context, transformer, transformer_input, transformer_config, packed_seq_params=None, **unused
    ) -> tuple[int, ...]:
        return packed_seq_params.lengths

    def forward(
        self, lengths: tuple[int, ...], offset: int = 0, packed_seq: bool = True, cp_group=None
    ) -> torch.Tensor:
        angles = self.get_emb(max(lengths), offset)  # [longest, 1, 1, d]
        return torch.cat([angles[:n] for n in lengths])
