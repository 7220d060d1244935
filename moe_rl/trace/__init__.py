"""Stores the routes that the sampler used, so that the trainer can send each token to the same experts.

store = TraceStore("runs/first/trace")
record = store.read(ref)  # ref: what the sampler sent, or one of store.records(shard) for a shard of store.shards()
record.routes, record.token_ids  # numpy [tokens, layers, top_k] and [tokens]
validate(record, token_ids=fed, spec=spec, weight_version=7)  # before a step is trained on them
"""

from moe_rl.trace.audit import verify
from moe_rl.trace.in_memory import MemoryTrace
from moe_rl.trace.record import RecordInfo, RouteRecord, TraceSpec
from moe_rl.trace.recovery import recover
from moe_rl.trace.source_sum import signed
from moe_rl.trace.store import TraceStore
from moe_rl.trace.validator import check_routes, validate
from moe_rl.trace.writer import ShardWriter

__all__ = [
    "MemoryTrace",
    "RecordInfo",
    "RouteRecord",
    "ShardWriter",
    "TraceSpec",
    "TraceStore",
    "check_routes",
    "recover",
    "signed",
    "validate",
    "verify",
]
