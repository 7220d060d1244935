"""What megatron-core takes from TransformerEngine, on torch ops: RMSNorm under sequence parallelism, causal attention
and rotary embedding over packed sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm whose weight is marked, as megatron's own norms are, for the sequence-parallel gradient sum."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class PackedAttention(torch.nn.Module):
    """Core attention for packed sequences (qkv_format "thd"): causal within each sequence, nothing across.

    q [T, heads, d], k and v [T, groups, d] -> [T, 1, heads * d] in the layout SelfAttention expects for thd.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, **unused
    ):
        super().__init__()
        self.softmax_scale = softmax_scale
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
        longest = max(lengths)
        slots = torch.cat(
            [torch.arange(i * longest, i * longest + n, device=query.device) for i, n in enumerate(lengths)]
        )

        def rectangle(t):  # [T, heads, d] -> [B, heads, longest, d]
            padded = t.new_zeros(len(lengths) * longest, *t.shape[1:]).index_copy(0, slots, t)
            return padded.view(len(lengths), longest, *t.shape[1:]).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            rectangle(query),
            rectangle(key),
            rectangle(value),
            is_causal=True,
            enable_gqa=True,
            scale=self.softmax_scale,
        )
        out = out.transpose(1, 2).flatten(0, 1).index_select(0, slots)  # [T, heads, d]
        return out.reshape(out.shape[0], 1, -1)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles for a whole packed run, every sequence counted from position 0.

    Megatron's own forward gives angles up to the longest sequence, and its unfused rope then rotates one sequence at a
    time. Given angles of the full length it rotates the run at once.
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
