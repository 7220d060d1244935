"""The routing-trace store: what the sampler routed, kept so that the trainer can take the same experts."""

from moe_rl.trace.store import RouteRecord, ShardWriter, TraceSpec, TraceStore, token_digest, validate

__all__ = ["RouteRecord", "ShardWriter", "TraceSpec", "TraceStore", "token_digest", "validate"]
