"""Records the experts of every forwarded token inside vLLM's worker. hooks.py shows what calls it.

    vLLM's scheduler output --- before_step ---> owners of the KV blocks; finished and preempted requests
    the routers ------------- capture.py ------> experts of the step's tokens (device)
    the forward pass -------- after_forward ---> one sum per token, taken on the device (trace/source_sum.py);
                                                 experts copied to the host, stored under their KV slots (slots.py)
    a finished request ------------------------> its rows, copied; appended to a trace shard while steps continue

Every read and write of the slots goes through one journal (slot_journal.py), in the order in which vLLM decided it. The
journal waits for a step's copy to the host; the step does not. So when a finished request's rows are taken, its blocks
still hold its own rows, even if vLLM has reassigned the blocks in the next step.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from moe_rl.errors import About, EngineError, MoeRLError
from moe_rl.trace.source_sum import placed_rows
from moe_rl.types import RouteRef
from moe_rl.vllm.capture import NOT_REPORTED, Capture, RowSums, to_host
from moe_rl.vllm.extras import Extras
from moe_rl.vllm.recording import Recording, RecordingRequest, parse
from moe_rl.vllm.router_witness import RouterWitness
from moe_rl.vllm.sinks import Sinks
from moe_rl.vllm.slot_journal import Allotted, SlotJournal
from moe_rl.vllm.slots import BlockTable, Recorded, Rows, SlotTable


class Recorder:
    """Records in one worker.

    Attributes:
        spec: the trace's spec.
        sinks: the shards being filled.
        weight_version: the version of the model's current weights.
        stats: counts since the start: steps, tokens forwarded, requests, recorded requests, preemptions, refused
            requests, waits for a copy, waits for records to be written (see sinks.py), rows rewritten by newer weights
            after a preemption, rows confirmed by their routers' logits (0 if not possible, see router_witness.py), and
            drafts of speculative decoding and how many were accepted, without the last before an end or a preemption.

    Raises:
        EngineError: the model has no MoE layers.
    """

    def __init__(self, worker, recording: object):
        self.recording = msgspec.convert(recording, Recording)
        config = worker.vllm_config
        self._runner = worker.model_runner
        self._device = worker.device
        self._speculates = config.speculative_config is not None
        model = self._runner.get_model()
        model_config = worker.model_config
        self._capture = Capture(
            model,
            max_tokens=self._runner.max_num_tokens,
            top_k=model_config.get_num_experts_per_tok(),
            device=worker.device,
        )
        stage, stages, every_layer = _pipeline(self._capture.layers)
        self.spec = self.recording.spec(model_config, every_layer)
        self.sinks = Sinks(
            Path(self.recording.trace_root),
            self.spec,
            layers=self._capture.layers,
            suffix=f".pp{stage}of{stages}" if stages > 1 else "",
        )
        self._extras = Extras.of(worker, self.recording, self._capture.modules, pipeline_stages=stages)
        self._witness = RouterWitness.of(worker, self._capture.modules, pipeline_stages=stages)
        # Created in the first step, when the KV cache exists. What is made here, while the model is loaded, lies in
        # vLLM's memory pool of weights. Its content is lost in a sleep of level 2, so nothing that lasts may be here.
        self._slots: SlotTable
        self._row_sums: RowSums
        self._requests: dict[str, Recorded] = {}
        self._partial_hits: dict[int, int] = {}
        self._step_is_open = False
        self.weight_version = 0
        self.publications: dict[str, Future[dict[str, RouteRef]]] = {}  # by the calls that began them
        self.stats: Counter[str] = Counter(witnessed=0)
        self._journal = SlotJournal(self.stats)

    # Control: called between steps, through the engine's collective_rpc.

    def publish(
        self,
        sink: str,
        sequences: Mapping[str, Sequence[int]],
        aborted: Sequence[str] = (),
        keep_open: bool = False,
        cut: bool = False,
    ) -> Future[dict[str, RouteRef]]:
        """Begin publishing a shard, while the engine's steps continue.

        Args:
            sink: name of the shard.
            sequences: key -> all token ids that must have been forwarded, prompt first. Without ids nobody awaits the
                record, and a request that still runs gets none.
            aborted: keys of requests stopped early; their records are marked.
            keep_open: publish nothing yet. The records are in the shard's file but not synced to the disk, and later
                records of this shard may continue them. Each is named in one such call.
            cut: with `keep_open`, publish the records so far. Later ones go to another shard, NAME.part1, NAME.part2,
                ..., and may continue them.

        Returns:
            A future: for each key this worker's reference, with one part and the sum over its layers, once the shard is
                visible. EngineError: a sequence was not recorded, or was recorded with other tokens. The shard is then
                unchanged.
        """
        for request in self._requests.values():
            if (ask := request.ask) is not None and ask.sink == sink and not len(sequences.get(ask.key, (0,))):
                request.ask = None
        self._journal.work_off(wait=True)
        return self.sinks.publish(sink, sequences, aborted, keep_open, cut)

    def open(self, sink: str, folder: str = "") -> None:
        """Begin or restart a shard. `folder` is the store's folder below the trace root. Raises TraceError."""
        if self._journal.awaits(sink):  # restarted: rows for the old shard must not enter it later
            self._journal.work_off(wait=True)
        self.sinks.open(sink, folder)

    def settle(self) -> None:
        """Take what the last steps recorded. The witness judges it by the routers' biases, which an update changes."""
        self._journal.work_off(wait=True)

    def abandon(self, sink: str) -> None:
        """Drop an unpublished shard, if it exists."""
        self._journal.work_off(wait=True)
        self.sinks.abandon(sink)

    def abandon_all(self) -> None:
        """Drop all unpublished shards."""
        self._journal.work_off(wait=True)
        self.sinks.abandon_all()

    def unfinished(self, sink: str) -> list[str]:
        """Return the keys of requests that may still add to a shard. vLLM reports a request's end one step later."""
        asks = [request.ask for request in self._requests.values()]
        return [ask.key for ask in asks if ask is not None and ask.sink == sink]

    # Hooks: the worker calls each once per step.

    def before_step(self, scheduled) -> None:
        """Learn from vLLM's SchedulerOutput which request owns which blocks in the coming step.

        Finished and preempted requests are read first, because this step may overwrite their blocks.
        """
        if self._step_is_open:
            raise EngineError(
                "A step was not recorded",
                got="a new step before the routes of the previous one were reported",
                do="check the patch series: moe-rl patch --check",
                fault="step lost",
            )
        self.sinks.check()
        self._step_is_open = scheduled.total_num_scheduled_tokens > 0
        if not hasattr(self, "_slots"):
            self._group, blocks, block_size = _attention_group(self._runner.kv_cache_config)
            row_shape = (len(self._capture.layers), self.spec.top_k)
            self._slots = SlotTable(blocks, block_size, row_shape, self.spec.dtype)
            self._row_sums = RowSums(self._capture.layers, self.spec.num_experts, self._device)
        for request_id in scheduled.preempted_req_ids or ():
            if (request := self._requests.get(request_id)) is not None:
                self._preempt(request)
        finished = [self._requests.pop(id_) for id_ in scheduled.finished_req_ids if id_ in self._requests]
        # vLLM reports them in no fixed order. Sorting makes the same requests always give the same shard.
        for request in sorted(finished, key=lambda request: request.number):
            self._finish(request)
        self._partial_hits.clear()
        allotted = Allotted()
        for new in scheduled.scheduled_new_reqs:
            self._begin(new, allotted)
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks, computed = cached.new_block_ids[index], cached.num_computed_tokens[index]
            self._continue(request_id, blocks, computed, allotted, resumed=request_id in cached.resumed_req_ids)
        self._journal.give(allotted, self._slots)
        for source, target in scheduled.kv_cache_block_copies or ():
            if (rows := self._partial_hits.get(target)) is not None:
                self._journal.add(partial(self._slots.copy, source, target, rows))
        for request_id, count in scheduled.num_scheduled_tokens.items():
            self._requests[request_id].forwarded += count
            self._requests[request_id].drafts = len(scheduled.scheduled_spec_decode_tokens.get(request_id, ()))
        self._capture.clear(scheduled.total_num_scheduled_tokens)
        if self._witness is not None:
            self._witness.begin_step(scheduled.total_num_scheduled_tokens, self._name_of_step(scheduled))
        self._journal.work_off()
        self.sinks.hand_over()

    def after_forward(self, scheduled) -> None:
        """Take the captured routes and the forwarded tokens; both are stored once the copies have arrived."""
        count = scheduled.total_num_scheduled_tokens
        if count == 0:
            return
        if not self._step_is_open:
            raise EngineError(
                "A step was recorded twice",
                got=f"the routes of {count} tokens that were not announced",
                do="check the patch series: moe-rl patch --check",
                fault="step twice",
            )
        self._step_is_open = False
        runner = self._runner
        routes = self._capture.buffer[:count]
        on_device = (
            routes,
            self._row_sums.of(routes),
            runner.input_batch.block_table[self._group].slot_mapping.gpu[:count],
            runner.positions[:count],
            runner.input_ids.gpu[:count],
        )
        copies, arrived = to_host(on_device)
        version = self.weight_version
        self._journal.add(lambda: self._store(version, *(copy.numpy() for copy in copies)), arrived)
        in_step = [(self._requests[id_], scheduled.num_scheduled_tokens[id_]) for id_ in runner.input_batch.req_ids]
        if self._witness is not None:
            self._see(self._witness, version, in_step)
        if self._extras is not None:
            self._extras.after_forward(in_step)
        self.stats["steps"] += 1
        self.stats["forwarded"] += count

    # The scheduler's actions on a request.

    def _begin(self, new, allotted: Allotted) -> None:
        try:
            ask = parse(new.sampling_params and new.sampling_params.extra_args, new.req_id)
        except MoeRLError as error:
            ask = None
            self._refuse(new, error)
        request = self._requests[new.req_id] = Recorded(
            self.stats["requests"],
            ask,
            np.asarray(new.prompt_token_ids or (), np.int32),
            new.num_computed_tokens,
            greedy=new.sampling_params is None or new.sampling_params.temperature == 0,
            began=self.weight_version,
        )
        self.stats["requests"] += 1
        self.stats["recorded"] += ask is not None
        self._own(request, new.block_ids, new.num_computed_tokens, allotted)

    def _continue(self, request_id: str, blocks, computed: int, allotted: Allotted, *, resumed: bool) -> None:
        request = self._requests[request_id]
        if resumed:
            self._own(request, blocks, computed, allotted)
        elif blocks is not None:
            allotted.add(request.table, list(blocks[self._group]), hits=0)
        if request.drafts and not resumed:
            self.stats["drafts"] += request.drafts
            self.stats["accepted_drafts"] += computed - request.forwarded + request.drafts
        request.forwarded = computed

    def _own(self, request: Recorded, blocks, computed: int, allotted: Allotted) -> None:
        """Give a request its first blocks. Blocks full of computed tokens are prefix-cache hits and already have their
        rows."""
        request.forwarded = computed
        mine, (hits, rest) = list(blocks[self._group]), divmod(computed, self._slots.block_size)
        if rest:
            self._partial_hits[mine[hits]] = rest
        allotted.add(request.table, mine, hits)

    def _preempt(self, request: Recorded) -> None:
        """Save the rows of a preempted request.

        vLLM later forwards the same tokens again in other batches, where near ties may be routed differently, but the
        sampled tokens came from the first pass. Rows of drafts that may have been rejected are not saved; their second
        pass is used.
        """
        table, forwarded = request.table, request.forwarded - request.drafts
        request.table, request.forwarded = BlockTable(), 0
        self.stats["preemptions"] += 1

        def keep() -> None:
            if (ask := request.ask) is not None:
                try:
                    request.kept = self._rows(request, ask, table, forwarded)
                except MoeRLError as error:
                    self.sinks.refuse(ask.sink, ask.key, error)
                    request.ask = None

        self._journal.add(keep)

    def _finish(self, request: Recorded) -> None:
        table, forwarded = request.table, request.forwarded

        def take() -> None:
            if (ask := request.ask) is not None:
                try:
                    rows = self._rows(request, ask, table, forwarded)
                    self.stats["rewritten"] += self._rewritten(request, ask, table, forwarded)
                    if self._witness is not None:
                        self.stats["witnessed"] += self._witness.check(request, rows)
                    aux = self._extras.of_request(request, len(rows)) if self._extras is not None else {}
                    self.sinks.add(request, ask, rows, aux)
                    self.stats["write_waits"] = self.sinks.waits
                except MoeRLError as error:
                    self.sinks.refuse(ask.sink, ask.key, error)
            for beside in (self._extras, self._witness):
                if beside is not None:
                    beside.drop(request)

        if request.ask is None:
            self._journal.add(take)
        else:
            self._journal.leave(request.ask.sink, table, take)

    def _name_of_step(self, scheduled) -> str:
        """Return the seed for choosing witnessed rows: the first request of the step and its position."""
        requests = (self._requests[request_id] for request_id in scheduled.num_scheduled_tokens)
        return next((f"{request.ask.key} {request.forwarded}" for request in requests if request.ask is not None), "")

    def _see(self, witness: RouterWitness, version: int, in_step: Sequence[tuple[Recorded, int]]) -> None:
        whose = witness.whose(in_step)
        (logits,), arrived = to_host((witness.logits(),))
        self._journal.add(lambda: witness.take(version, logits.numpy(), whose), arrived)

    def _refuse(self, new, error: MoeRLError) -> None:
        """Remember why a request cannot be recorded. It is sampled anyway; publishing its routes reports the reason."""
        args = new.sampling_params.extra_args
        self.stats["refused"] += 1
        self.sinks.refuse(str(args.get("moe_rl_sink")), str(args.get("moe_rl_key")), error)

    # Callbacks of the journal.

    def _store(
        self,
        weight_version: int,
        routes: np.ndarray,
        sums: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        token_ids: np.ndarray,
    ) -> None:
        if routes.min() < 0 or routes.max() >= self.spec.num_experts:
            outside = np.nonzero((routes < 0) | (routes >= self.spec.num_experts))
            token, layer, choice = (int(axis[0]) for axis in outside)
            got = int(routes[token, layer, choice])
            raise EngineError(
                "A router reported no expert" if got == NOT_REPORTED else "A router reported an expert out of range",
                where={"layer": self._capture.layers[layer], "token": token},
                got=got,
                expected=f"0 to {self.spec.num_experts - 1}",
                do="check that this vLLM routes through its router objects",
                fault="no expert" if got == NOT_REPORTED else "range",
            )
        placed = placed_rows(sums, positions, token_ids, weight_version)
        self._slots.write(slots, positions, token_ids, routes, placed, weight_version, may_repeat=self._speculates)

    def _rows(self, request: Recorded, ask: RecordingRequest, table: BlockTable, forwarded: int) -> Rows:
        """Return all rows of a request up to `forwarded`; after a preemption those of the first pass."""
        rows = request.kept
        who: About = {"request": ask.key}
        if rows is None:
            rows = self._slots.read(table, 0, forwarded, who)
        elif forwarded > len(rows):
            rows = rows.then(self._slots.read(table, len(rows), forwarded, who))
        prompt = request.prompt[: len(rows)]
        wrong = np.flatnonzero(rows.token_ids[: len(prompt)] != prompt)
        if wrong.size:
            position = wrong[0]
            raise EngineError(
                "A recorded row belongs to a token that is not in the prompt there",
                where={**who, "position": position},
                got=int(rows.token_ids[position]),
                expected=int(prompt[position]),
                do="check that this vLLM has the version of its patch series",
                fault="another token",
            )
        return rows

    def _rewritten(self, request: Recorded, ask: RecordingRequest, table: BlockTable, forwarded: int) -> int:
        """Return how many saved rows of a preempted request were computed again with newer weights. Later tokens
        attended to the keys of these weights, but the rows stay those of the first pass."""
        if (kept := request.kept) is None:
            return 0
        again = self._slots.read(table, 0, min(len(kept), forwarded), {"request": ask.key})
        return int(np.count_nonzero(again.weight_versions > kept.weight_versions[: len(again)]))


def _pipeline(layers: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
    """Return the stage and the number of stages of this worker, and the MoE layers of all stages."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    if group.world_size == 1:
        return 0, 1, layers
    everyones: list[tuple[int, ...]] = [()] * group.world_size
    torch.distributed.all_gather_object(everyones, layers, group=group.cpu_group)
    return group.rank_in_group, group.world_size, tuple(sorted(layer for of_stage in everyones for layer in of_stage))


def _attention_group(config) -> tuple[int, int, int]:
    """Return the index of the full-attention group in vLLM's KVCacheConfig, its number of blocks, and tokens per
    block."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec, UniformTypeKVCacheSpecs

    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = next(iter(spec.kv_cache_specs.values()))
        # RSWASpec is a FullAttentionSpec too, but frees blocks that leave its window.
        if isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec):
            return index, config.num_blocks, spec.block_size
    raise EngineError("Recording needs full attention", got="a model without full attention", do="turn recording off")
