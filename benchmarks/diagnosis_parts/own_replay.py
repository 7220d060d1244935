"""A small trainer on megatron-core's own RouterReplay, and the faults that were reported in public of such trainers.

Each fault is planted as the trainer's own mistake: in what it hands to `set_replay_data`, when, and to whom. The model,
its routers, the replay and the recomputation are megatron-core's, unchanged. The CPU has no fused router; its place is
taken by a function that, like TransformerEngine's, does not look at the routes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
from megatron.core.models.gpt import gpt_layer_specs, gpt_model
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_rl.megatron import world  # noqa: F401 - before megatron on a machine without a GPU
from moe_rl.replay.audit_report import AuditReport
from moe_rl.replay.router_audit import Audit, audit, row_places
from moe_rl.trace.adapters.outgoing import to_megatron

VOCAB = 97
Targets = list[torch.Tensor]  # one [R, K] for each instance of RouterReplay, in the order in which they were made


@dataclass
class Layout:
    """Holds what a trainer is built with. virtual: chunks of the model, run as in interleaved stages."""

    layers: int = 2
    dense: int = 0
    experts: int = 32
    top_k: int = 4
    mtp: int = 0
    virtual: int = 1
    recompute: bool = False
    sequences: int = 4
    width: int = 40
    microbatches: int = 3
    context: int = 1
    padded: int = 0


class Trainer:
    """Trains one step on recorded routes, with megatron-core's RouterReplay."""

    def __init__(self, layout: Layout, seed: int = 0):
        RouterReplay.clear_global_router_replay_instances()
        self.layout, self.rank = layout, 0  # rank: of context parallelism
        torch.manual_seed(seed)
        self.chunks = [self._chunk(at) for at in range(layout.virtual)]
        self.instances = list(RouterReplay.global_router_replay_instances)
        rng = np.random.default_rng(seed)
        count, width = layout.sequences * layout.microbatches, layout.width - layout.padded
        # No token follows itself, which could repeat a row.
        self.tokens = [1 + rng.integers(1, VOCAB - 1, width).cumsum() % (VOCAB - 1) for _ in range(count)]
        self.routes = self._record(rng)

    def _chunk(self, at: int) -> gpt_model.GPTModel:
        one = self.layout
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        config = TransformerConfig(
            num_layers=one.layers // one.virtual, hidden_size=32, num_attention_heads=2, ffn_hidden_size=32,
            num_moe_experts=one.experts, moe_router_topk=one.top_k, moe_ffn_hidden_size=16,
            moe_layer_freq=[0] * one.dense + [1] * (one.layers // one.virtual - one.dense),
            moe_router_load_balancing_type="none", moe_token_dispatcher_type="allgather",
            moe_enable_routing_replay=True, moe_router_dtype="fp32", init_method_std=0.3, hidden_dropout=0.0,
            attention_dropout=0.0, add_bias_linear=False, mtp_num_layers=one.mtp or None,
            **(recompute if one.recompute else {}),
        )  # fmt: skip
        spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if one.mtp else None
        model = gpt_model.GPTModel(
            config, spec, vocab_size=VOCAB, max_sequence_length=64, position_embedding_type="rope",
            pre_process=at == 0, post_process=at == one.virtual - 1, mtp_block_spec=mtp,
        )  # fmt: skip
        for module in model.modules():  # chunks of one rank count their layers from 1
            if hasattr(module, "router"):
                module.router.layer_number += at * config.num_layers
        return model

    @property
    def layer_map(self) -> str:
        return "d" * self.layout.dense + "m" * (self.layout.layers - self.layout.dense)

    def places(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return whose row each row of a microbatch is, as routers see them."""
        one = self.layout
        first = number * one.sequences
        return row_places(
            range(first, first + one.sequences), [one.width - one.padded] * one.sequences, order="sequence first",
            padded_to=one.width, context=(self.rank, one.context),
        )  # fmt: skip

    def forward(self, number: int, chunk: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Run a chunk on a microbatch: token ids [B, S] in, hidden states or the loss out."""
        sequence, position = self.places(number)
        ids = np.array([0 if s < 0 else self.tokens[s][p] for s, p in zip(sequence, position, strict=True)])
        grid = torch.from_numpy(ids.reshape(-1, self.layout.sequences).T.copy())
        where = torch.from_numpy(position.reshape(-1, self.layout.sequences).T.copy())
        model = self.chunks[chunk]
        if hidden is not None:
            model.set_input_tensor(hidden)
        last, width = chunk == self.layout.virtual - 1, grid.shape[1]
        causal = torch.ones(1, 1, width, width).triu(1).bool()
        return model(grid, where, causal, labels=grid if last else None)

    def whole(self, number: int) -> torch.Tensor:
        """Run all chunks on a microbatch."""
        hidden = None
        for chunk in range(self.layout.virtual):
            hidden = self.forward(number, chunk, hidden)
        return hidden

    @torch.no_grad()
    def _record(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Record what the model chooses, with a sampler's noise: every second of the six rows in a hundred that are
        nearest to a tie takes the next expert."""
        one = self.layout
        layers = one.layers - one.dense
        routes = [np.zeros((len(ids), layers, one.top_k), np.int64) for ids in self.tokens]
        watch = audit(self.chunks)
        for self.rank in range(one.context):
            for number in range(one.microbatches):
                places = self.places(number)
                step = watch.step(self.tokens, routes, [places], layers=self.layer_map)
                with step:
                    step.forward(0)
                    self.whole(number)
                sequence, position = places
                real = sequence >= 0
                for (_, layer), scores in step._scores.items():
                    values, ranked = (part.numpy() for part in scores.sort(1, descending=True))
                    gaps = values[:, one.top_k - 1] - values[:, one.top_k]
                    swap = (gaps <= np.quantile(gaps, 0.06)) & (rng.random(len(ranked)) < 0.5)
                    ranked[swap, one.top_k - 1] = ranked[swap, one.top_k]
                    for row in np.flatnonzero(real):
                        column = layer - one.dense
                        routes[sequence[row]][position[row], column] = np.sort(ranked[row, : one.top_k])
        self.rank = 0
        watch.close()
        return routes

    def targets(self, number: int) -> Targets:
        """Return what a sound trainer hands to the routers of a microbatch: padding is spread over the experts."""
        one = self.layout
        columns = range(one.layers - one.dense)
        rows = to_megatron(self.routes, *self.places(number), columns=columns, num_experts=one.experts)
        return [torch.from_numpy(each) for each in rows]

    def set_action(self, action: RouterReplayAction | None, chunk: int | None = None) -> None:
        """Switch the routers of the decoder."""
        mine = self.mine(chunk)
        for one in mine:
            one.router_replay_action = action

    def mine(self, chunk: int | None = None) -> list[RouterReplay]:
        """Return the replays of the decoder's routers, of one chunk or of all."""
        each = (self.layout.layers - self.layout.dense) // self.layout.virtual
        decoder = self.instances[: each * self.layout.virtual]
        return decoder if chunk is None else decoder[chunk * each : chunk * each + each]

    def hand_over(self, number: int, targets: Targets, chunk: int) -> None:
        """Give the routers of a chunk the routes of a microbatch."""
        each = len(targets) // self.layout.virtual
        for one, rows in zip(self.mine(chunk), targets[chunk * each : chunk * each + each], strict=True):
            one.set_target_indices(rows)

    def train(self, step, deliver: Callable[[int, Targets], Targets] = lambda _, targets: targets) -> None:
        """Run one step: warm up with one forward, then a forward and a backward in turn, as 1F1B does.

        deliver: What happens to the routes between the record and the routers.
        """
        waiting = []
        for number in range(self.layout.microbatches):
            self.set_action(RouterReplayAction.REPLAY_FORWARD)
            step.forward(number)
            hidden = None
            for chunk in range(self.layout.virtual):
                self.hand_over(number, deliver(number, self.targets(number)), chunk)
                hidden = self.forward(number, chunk, hidden)
            waiting.append(hidden)
            if len(waiting) > 1:
                self.backward(waiting.pop(0))
        for loss in waiting:
            self.backward(loss)
        RouterReplay.clear_global_indices()
        RouterReplay.clear_global_router_replay_action()

    def backward(self, loss: torch.Tensor) -> None:
        """Run a backward pass, with the routers switched to the queue of recomputations."""
        self.set_action(RouterReplayAction.REPLAY_BACKWARD)
        loss.mean().backward()

    def step(self, watch: Audit, routes: list[np.ndarray] | None = None, versions=None):
        """Return the audit's context of a step. routes: the record, if it is not that of the trainer."""
        return watch.step(
            self.tokens, self.routes if routes is None else routes,
            [self.places(number) for number in range(self.layout.microbatches)], layers=self.layer_map,
            prompts=[8 + 7 * at % (len(ids) - 16) for at, ids in enumerate(self.tokens)], versions=versions,
        )  # fmt: skip


LAYOUTS = {
    "plain": Layout(),
    "recomputation": Layout(recompute=True),
    "dense layers": Layout(layers=3, dense=1),
    "virtual stages": Layout(virtual=2, recompute=True),
    "padding": Layout(padded=8),
    "MTP": Layout(mtp=1),
    "context parallel": Layout(context=2, width=64),
    "many experts": Layout(experts=320, sequences=2, width=32),
    "one sequence": Layout(sequences=1, width=64, microbatches=6),
}
"""Layouts in which a sound trainer must stay silent."""


def healthy(name: str, seed: int = 0, **changes) -> AuditReport:
    """Audit a step of a sound trainer. changes: of the layout."""
    trainer = Trainer(replace(LAYOUTS[name], **changes), seed)
    return _run(trainer, lambda step: trainer.train(step))


def _run(trainer: Trainer, work: Callable, **given) -> AuditReport:
    watch = audit(trainer.chunks)
    try:
        with trainer.step(watch, **given) as step:
            work(step)
        assert step.report is not None
        return step.report
    finally:
        watch.close()
        RouterReplay.clear_global_router_replay_instances()


def _delivered(layout: Layout, change: Callable[[Trainer, int, Targets], Targets], seed: int) -> AuditReport:
    trainer = Trainer(layout, seed)
    return _run(trainer, lambda step: trainer.train(step, lambda number, rows: change(trainer, number, rows)))


def orphan_routers(seed: int) -> AuditReport:
    """verl#7340: the decoder is built twice, and the trainer serves the routers that were made first."""
    orphans = Trainer(Layout(), seed).instances
    trainer = Trainer(Layout(), seed)
    RouterReplay.global_router_replay_instances[:0] = orphans
    trainer.instances = orphans
    return _run(trainer, lambda step: trainer.train(step))


def fused_router(seed: int) -> AuditReport:
    """The fused function of the router returns before it looks at the routes."""
    trainer = Trainer(Layout(), seed)

    def fused(logits, topk, **_):
        return moe_utils.topk_routing_with_score_function(logits, topk)

    for chunk in trainer.chunks:
        chunk.config.moe_router_fusion = True
    with (
        mock.patch.object(moe_utils, "HAVE_TE", True),
        mock.patch.object(moe_utils, "fused_topk_with_score_function", fused),
    ):
        return _run(trainer, lambda step: trainer.train(step))


def virtual_stages(seed: int) -> AuditReport:
    """SkyRL#2078, #2233: each forward of a chunk appends to the queues of all chunks."""
    trainer = Trainer(LAYOUTS["virtual stages"], seed)

    def hand_over(number: int, targets: Targets, chunk: int) -> None:
        RouterReplay.set_replay_data(targets)

    trainer.hand_over = hand_over  # type: ignore[method-assign]
    return _run(trainer, lambda step: trainer.train(step))


def forward_only(seed: int) -> AuditReport:
    """SkyRL#1908: a pass without gradients leaves its entries in the queues."""
    trainer = Trainer(Layout(recompute=True), seed)
    rng = np.random.default_rng(seed + 1)
    with torch.no_grad():  # a pass on other routes, such as that of a reference or of an earlier step
        RouterReplay.set_replay_data([torch.from_numpy(rng.permuted(one, axis=0)) for one in trainer.targets(0)])
        trainer.set_action(RouterReplayAction.REPLAY_FORWARD)
        trainer.whole(0)
    return _run(trainer, lambda step: trainer.train(step))


def action_not_switched(seed: int) -> AuditReport:
    """Recomputations run with the action of the forward pass, which has gone on to another microbatch."""
    trainer = Trainer(Layout(recompute=True), seed)
    trainer.backward = lambda loss: loss.mean().backward()  # type: ignore[method-assign]
    return _run(trainer, lambda step: trainer.train(step))


def batch_first(seed: int) -> AuditReport:
    """miles#3146: routes are flattened batch first, and routers see rows sequence first."""

    def change(trainer: Trainer, _: int, targets: Targets) -> Targets:
        count = trainer.layout.sequences
        return [one.view(-1, count, one.shape[1]).transpose(0, 1).reshape(one.shape) for one in targets]

    return _delivered(Layout(), change, seed)


def mtp_layer(seed: int) -> AuditReport:
    """NeMo-RL#3903, #4057: the router of the MTP layer is served with the routes of decoder layer 0."""
    trainer = Trainer(LAYOUTS["MTP"], seed)
    hand_over = trainer.hand_over

    def also(number: int, targets: Targets, chunk: int) -> None:
        hand_over(number, targets, chunk)
        trainer.instances[-1].set_target_indices(targets[0])
        trainer.instances[-1].router_replay_action = RouterReplayAction.REPLAY_FORWARD

    trainer.hand_over = also  # type: ignore[method-assign]
    return _run(trainer, lambda step: trainer.train(step))


def padding(seed: int) -> AuditReport:
    """prime-rl#3350: bytes of zero pad the routes, so that all padding goes to expert 0."""

    def change(trainer: Trainer, number: int, targets: Targets) -> Targets:
        pad = torch.from_numpy(trainer.places(number)[0] < 0)[:, None]
        return [torch.where(pad, 0, one) for one in targets]

    return _delivered(LAYOUTS["padding"], change, seed)


def context_slice(seed: int) -> AuditReport:
    """ms-swift#9799: routes are cut into contiguous halves, and tokens in Megatron's zigzag."""

    def change(trainer: Trainer, number: int, targets: Targets) -> Targets:
        sequence, position = trainer.places(number)
        order = np.sort(position)  # the first half of each sequence
        other = {value: rank for rank, value in enumerate(np.unique(order))}
        rows = [(s, other[p]) for s, p in zip(sequence.tolist(), position.tolist(), strict=True)]
        return [
            torch.from_numpy(np.array([trainer.routes[s][p, column] for s, p in rows]))
            for column in range(len(targets))
        ]

    return _delivered(LAYOUTS["context parallel"], change, seed)


def wrapped(seed: int) -> AuditReport:
    """ms-swift: ids of more than 256 experts are stored as bytes."""
    return _delivered(LAYOUTS["many experts"], lambda _, __, rows: [one % 256 for one in rows], seed)


def zero_rows(seed: int) -> AuditReport:
    """vllm#44116, NeMo-RL#3903: the buffer of some rows was never written."""

    def change(trainer: Trainer, _: int, targets: Targets) -> Targets:
        return [torch.where(torch.arange(len(one))[:, None] >= len(one) // 2, 0, one) for one in targets]

    return _delivered(Layout(), change, seed)


def last_writer(seed: int) -> AuditReport:
    """A completion is continued after an update: the prefix is computed again, and its rows replace the first ones."""
    trainer = Trainer(Layout(), seed)
    rng = np.random.default_rng(seed)
    first, versions = trainer.routes, []
    later = [one.copy() for one in first]
    for one in later:
        versions.append(np.where(np.arange(len(one)) < 20, 3, 4))
        swap = rng.random(one[:20].shape[:2]) < 0.5  # newer weights choose another expert for half of the rows
        for row, column in np.argwhere(swap):
            free = np.setdiff1d(np.arange(trainer.layout.experts), one[row, column])
            one[row, column, 0] = rng.choice(free)
            one[row, column].sort()
    trainer.routes = later
    return _run(trainer, lambda step: trainer.train(step), routes=first, versions=versions)


def off_by_one(seed: int) -> AuditReport:
    """The recorder writes a row for the token before it: the record itself is wrong, and it is replayed exactly."""
    trainer = Trainer(Layout(sequences=6), seed)
    trainer.routes = [np.roll(one, -1, axis=0) for one in trainer.routes]
    return _run(trainer, lambda step: trainer.train(step))


def shifted_rows(seed: int) -> AuditReport:
    """The trainer cuts the routes one token too late (multi-turn templates, SGLang#20964)."""
    trainer = Trainer(Layout(), seed)
    first = trainer.routes
    trainer.routes = [np.roll(one, 1, axis=0) for one in first]
    return _run(trainer, lambda step: trainer.train(step), routes=first)


def dense_layer(seed: int) -> AuditReport:
    """verl, DeepSeek: the dense first layer is not counted, so every later layer has the routes of its neighbour."""

    def change(_: Trainer, __: int, targets: Targets) -> Targets:
        return [*targets[1:], targets[-1]]

    return _delivered(LAYOUTS["dense layers"], change, seed)


def stale_target(seed: int) -> AuditReport:
    """The routes of the first microbatch are left in place for all."""
    return _delivered(Layout(), lambda trainer, _, __: trainer.targets(0), seed)


def other_sequence(seed: int) -> AuditReport:
    """Routes and tokens of a group are sorted differently."""
    trainer = Trainer(Layout(), seed)
    first = trainer.routes
    trainer.routes = [first[at + 1 if at % 2 == 0 else at - 1] for at in range(len(first))]
    return _run(trainer, lambda step: trainer.train(step), routes=first)


def capacity(seed: int) -> AuditReport:
    """A capacity factor drops recorded experts after the replay."""
    trainer = Trainer(Layout(), seed)
    for chunk in trainer.chunks:
        for module in chunk.modules():
            if hasattr(module, "router"):
                module.router.config.moe_expert_capacity_factor = 1.0
    return _run(trainer, lambda step: trainer.train(step))


def duplicates(seed: int) -> AuditReport:
    """verl#4986: rows name an expert twice, so fewer experts than top-k get the token."""

    def change(_: Trainer, __: int, targets: Targets) -> Targets:
        return [torch.cat([one[:, :-1], one[:, :1]], 1) for one in targets]

    return _delivered(Layout(), change, seed)


def not_replayed(seed: int) -> AuditReport:
    """NeMo-RL#3327, prime-rl#2738: the setting is on, and nothing switches the routers."""
    trainer = Trainer(Layout(), seed)
    trainer.set_action = lambda action, chunk=None: None  # type: ignore[method-assign]
    return _run(trainer, lambda step: trainer.train(step))


PLANTED: dict[str, tuple[str, Callable[[int], AuditReport]]] = {
    "a decoder built twice": ("orphan routers", orphan_routers),
    "fused router": ("fused router", fused_router),
    "queues out of step under virtual stages": ("out of step", virtual_stages),
    "entries left by a forward-only pass": ("left entries", forward_only),
    "the action of the forward pass in recomputations": ("out of step", action_not_switched),
    "batch-first rows": ("batch first", batch_first),
    "MTP layer numbers": ("mtp layer", mtp_layer),
    "padding to expert 0": ("padding", padding),
    "wrong slice of context parallelism": ("other slice", context_slice),
    "bytes for more than 256 experts": ("wrapped ids", wrapped),
    "zero-filled rows": ("zero rows", zero_rows),
    "last writer on resume": ("last writer", last_writer),
    "capture off by one": ("shift", off_by_one),
    "rows shifted by the trainer": ("rows shifted", shifted_rows),
    "dense layer not counted": ("other layer", dense_layer),
    "routes of the first microbatch for all": ("other microbatch", stale_target),
    "routes of another sequence": ("other sequence", other_sequence),
    "capacity factor": ("dropped", capacity),
    "an expert named twice": ("too few experts", duplicates),
    "replay never switched on": ("not replayed", not_replayed),
}
"""{fault: (the name that the audit must give it first, how it is planted)}"""
