"""moe_rl: routing replay and GSPO for mixture-of-experts models, vLLM to sample, Megatron-core to train."""

__version__ = "0.1.0"
