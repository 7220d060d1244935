"""Records the experts of every forwarded token inside vLLM's worker. Runs in the engine; see hooks.py for who calls.

Rows are keyed by KV slot, the one name of a (request, position) that survives everything vLLM does with it: a cached
prefix, chunked prefill and samples that share a prompt point at the slots whose rows are already there. Beside the
experts the token id that was forwarded is kept, so that the digest of a trace is of what the engine really computed.

Legend for shapes: S KV slots, T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from moe_rl.errors import EngineError, describe
from moe_rl.trace.store import ShardWriter, TraceSpec
from moe_rl.types import RouteRef

_NOT_REPORTED = -1


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value of `additional_config["moe_rl"]`. trace_root: folder of the trace store."""

    trace_root: str
    model_fingerprint: str


@dataclass(slots=True)
class _Request:
    """One request on its way. blocks: its KV blocks. forwarded: tokens whose rows are in the store or in `kept`.

    kept: routes [n, L, K] and token ids [n] saved when it was preempted, because its blocks were given away.
    """

    key: str
    blocks: list[int]
    forwarded: int
    kept: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(slots=True)
class _Shard:
    """The shard being written. finished: key -> (routes [n, L, K], token ids [n])."""

    writer: ShardWriter
    weight_version: int
    finished: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


class Recorder:
    """One per worker. `begin`, sample, `finish` make one shard; requests without a key are sampled but not recorded.

    The key of a request is `SamplingParams.extra_args["moe_rl_key"]`. forwarded, preemptions: tokens computed and
    requests interrupted since `begin`. Raises EngineError for a model without MoE layers.
    """

    def __init__(self, worker, recording: object):
        recording = msgspec.convert(recording, Recording)
        self._runner = worker.model_runner
        layers = _moe_layers(self._runner.get_model())
        self.spec = TraceSpec(
            model_fingerprint=recording.model_fingerprint,
            num_experts=worker.model_config.get_num_experts(),
            top_k=worker.model_config.get_num_experts_per_tok(),
            moe_layers=tuple(layers),
        )
        self._root = Path(recording.trace_root)
        self._captured = torch.full(
            (self._runner.max_num_tokens, len(layers), self.spec.top_k),
            _NOT_REPORTED,
            dtype=torch.int32,
            device=worker.device,
        )
        for column, layer in enumerate(layers.values()):
            layer.router.set_capture_fn(partial(_capture, self._captured, column))
        self._routes: np.ndarray | None = None  # [S, L, K]; made when the KV cache is there
        self._requests: dict[str, _Request] = {}
        self._shard: _Shard | None = None
        self.forwarded = self.preemptions = 0

    def begin(self, shard: str, weight_version: int) -> None:
        """Open the shard that everything sampled until `finish` goes to. Raises TraceError when it exists."""
        self.abandon()
        self.forwarded = self.preemptions = 0
        self._shard = _Shard(ShardWriter(self._root, shard, self.spec), weight_version)

    def finish(self, rows: Mapping[str, int]) -> dict[str, RouteRef]:
        """Publish the shard. rows: key -> tokens of that sequence that had to be forwarded, in the order to write.

        Asynchronous scheduling forwards one token too many, whose row is dropped; fewer rows are an EngineError.
        """
        shard, refs = self._shard, {}
        if shard is None:
            raise EngineError(describe("Routes were asked for but no shard was begun"))
        try:
            for key, wanted in rows.items():
                routes, token_ids = shard.finished.get(key, ((), ()))
                if len(routes) < wanted:
                    raise EngineError(
                        describe(
                            "The engine did not record every forwarded token",
                            where=f"request {key}",
                            got=f"{len(routes)} rows",
                            expected=wanted,
                            do="check the patch series: python tools/apply_patches.py --check",
                        )
                    )
                refs[key] = shard.writer.add(key, routes[:wanted], token_ids[:wanted], shard.weight_version)
            shard.writer.publish()
        except BaseException:
            self.abandon()
            raise
        self._shard = None
        return refs

    def abandon(self) -> None:
        """Drop the shard that was begun, if one was."""
        if self._shard is not None:
            self._shard.writer.abandon()
            self._shard = None

    def before_step(self, scheduled) -> None:
        """Learn from vLLM's SchedulerOutput who owns which blocks in the step to come.

        Finished and preempted requests are read first: this very step may write to the blocks that they had.
        """
        if self._routes is None:
            self._group, self._layer_name, self._block_size, slots = _attention_group(self._runner.kv_cache_config)
            self._routes = np.zeros((slots, *self.spec.row_shape), self.spec.dtype)
            self._token_ids = np.zeros(slots, np.int32)
        for request_id in scheduled.preempted_req_ids or ():
            if (request := self._requests.get(request_id)) is not None:
                request.kept = self._rows(request)
                request.blocks, request.forwarded = [], 0
                self.preemptions += 1
        for request_id in scheduled.finished_req_ids:
            if (request := self._requests.pop(request_id, None)) is not None and self._shard is not None:
                self._shard.finished[request.key] = self._rows(request)
        for new in scheduled.scheduled_new_reqs:
            key = ((new.sampling_params and new.sampling_params.extra_args) or {}).get("moe_rl_key")
            if key is not None:
                self._requests[new.req_id] = _Request(key, list(new.block_ids[self._group]), new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            if (request := self._requests.get(request_id)) is None:
                continue
            blocks = cached.new_block_ids[at]
            if request_id in cached.resumed_req_ids:
                request.blocks = list(blocks[self._group])
            elif blocks is not None:
                request.blocks += blocks[self._group]
            request.forwarded = cached.num_computed_tokens[at]
        for request_id, count in scheduled.num_scheduled_tokens.items():
            if (request := self._requests.get(request_id)) is not None:
                request.forwarded += count
        # A layer that does not report in this step must not leave the previous step's experts behind.
        self._captured[: scheduled.total_num_scheduled_tokens].fill_(_NOT_REPORTED)

    def after_forward(self, scheduled) -> None:
        """Store what the routers captured and what was forwarded, under the slots the step wrote its keys to."""
        count = scheduled.total_num_scheduled_tokens
        if count == 0:
            return
        slots = self._runner.execute_model_state.slot_mappings[self._layer_name][:count].cpu().numpy()
        captured = self._captured[:count].cpu().numpy()
        if captured.min() < 0 or captured.max() >= self.spec.num_experts:
            token, layer, choice = (int(axis[0]) for axis in np.nonzero(_out_of_range(captured, self.spec.num_experts)))
            raise EngineError(
                describe(
                    "A router reported no expert" if captured[token, layer, choice] < 0 else "A router left its range",
                    where=f"layer {self.spec.moe_layers[layer]}, token {token} of the step",
                    got=captured[token, layer, choice],
                    expected=f"0 to {self.spec.num_experts - 1}",
                    do="check that this vLLM routes through its router objects",
                )
            )
        self._routes[slots] = captured
        self._token_ids[slots] = self._runner.input_ids.gpu[:count].cpu().numpy()
        self.forwarded += count

    def _rows(self, request: _Request) -> tuple[np.ndarray, np.ndarray]:
        """Routes and token ids of all forwarded tokens: those that decided the sampling where it was preempted since.

        After a preemption vLLM forwards the same tokens again, in other batches, where a near tie may fall otherwise;
        the sampled tokens, however, followed from the first pass.
        """
        kept_routes, kept_ids = request.kept or (self._routes[:0], self._token_ids[:0])
        positions = np.arange(len(kept_routes), max(len(kept_routes), request.forwarded))
        blocks = np.asarray(request.blocks, np.int64)
        slots = blocks[positions // self._block_size] * self._block_size + positions % self._block_size
        return np.concatenate([kept_routes, self._routes[slots]]), np.concatenate([kept_ids, self._token_ids[slots]])


def _moe_layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """vLLM's MoERunner of every MoE layer, by global decoder layer number, ascending."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    found = [(int(module.layer_id), module) for module in model.modules() if isinstance(module, MoERunner)]
    layers = dict(sorted(found, key=lambda item: item[0]))
    if not layers or len(layers) != len(found):
        raise EngineError(
            describe(
                "Routes cannot be recorded for this model",
                got="no MoE layer" if not found else f"several in one decoder layer: {sorted(n for n, _ in found)}",
                do="take a mixture-of-experts model, or turn recording off",
            )
        )
    return layers


def _attention_group(config) -> tuple[int, str, int, int]:
    """Of vLLM's KVCacheConfig: index of the group with full attention, one of its layers, tokens a block, slots."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for at, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            block_size = group.kv_cache_spec.block_size
            return at, group.layer_names[0], block_size, config.num_blocks * block_size
    raise EngineError(describe("Recording needs full attention", got="a model without", do="turn recording off"))


def _capture(captured: Tensor, column: int, expert_ids: Tensor) -> None:
    """Called by a router with its choice [T, K]. Plain indexing: a compiled forward pass traces through it."""
    captured[: expert_ids.shape[0], column] = expert_ids


def _out_of_range(captured: np.ndarray, num_experts: int) -> np.ndarray:
    return (captured < 0) | (captured >= num_experts)
