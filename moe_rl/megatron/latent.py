"""Multi-head latent attention over packed sequences: megatron's own, but for what that assumes of its parts."""

from __future__ import annotations

from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from moe_rl.megatron.layers import PackedRotaryEmbedding, WholeLinear


class LatentAttention(MLASelfAttention):
    """MLASelfAttention that rotates packed sequences and has the norms that its spec says.

    Megatron derives the norms from one switch, which a model without a query down-projection (Moonlight) does not fit:
    it would get a second norm on the queries with TransformerEngine, and an error without.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = PackedRotaryEmbedding(self.rotary_pos_emb)

    def _resolve_qk_norm_config(self, submodules):
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class TorchLatentAttention(LatentAttention):
    """LatentAttention whose down-projections are whole on every tensor-parallel rank, as TransformerEngine's are.

    Megatron's torch linear layer cuts them and gathers the result. The rotated key, which is one for all heads, then
    loses the gradients of the heads on other ranks: the gather gives each rank the part of its own gradient back.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        config = self.config
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, rows)
