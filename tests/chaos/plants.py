"""The code of planted faults: each changes one function of moe_rl in the process that it belongs to.

A fault is in every process that has `plug/` on its PYTHONPATH and CHAOS in its environment. It does nothing until it is
armed: the file that CHAOS names holds the name of the armed one. When it does harm it writes its name, what it harmed,
the process and the time to `<that file>.fired`. That line is the witness: without it the fault proves nothing.

Only the standard library is imported up here: processes that never load the module of a fault do not pay for it.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.util
import io
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

# (fault, module, name in it, what makes the faulty function of the sound one)
_PLANTS: list[tuple[str, str, str, Callable]] = []
# Layers and experts that faults are about: the tests look for their names in what is said.
LAYER, OTHER_LAYER = 3, 4
EXPERT, OTHER_EXPERT = 4, 5
EXPERTS = 32
GATE = "model.layers.{}.mlp.gate.weight"
UNWATCHED = ", logits unseen"
"""Suffix of a fault's name: no rows are compared with the routers' logits."""
RANK = " on rank "
"""Suffix of a fault's name, before a rank: the fault is planted in that rank only."""
FORGET = "an engine that takes the next update as its first"
NEWEST = 1
"""Version of the trainer's weights where these are newer than those that sampled."""
STALE_TENSOR = "model.layers.3.self_attn.q_proj.weight"


def arm(control: Path, fault: str) -> None:
    """Let a fault happen from now on; "": none."""
    unfinished = control.with_suffix(".new")
    unfinished.write_text(fault)
    unfinished.replace(control)


@dataclass(frozen=True)
class Witness:
    """A fault happened. harmed: what it was done to, in words. at: of time.monotonic()."""

    fault: str
    harmed: str
    who: str
    at: float


def witnesses(control: Path, fault: str) -> list[Witness]:
    """Return a witness of each time that the fault happened."""
    with suppress(FileNotFoundError):
        lines = [line.split("\t") for line in Path(f"{control}.fired").read_text().splitlines()]
        return [Witness(name, harmed, who, float(at)) for name, harmed, who, at in lines if name == fault]
    return []


def _armed() -> str:
    with suppress(OSError):
        return Path(os.environ["CHAOS"]).read_text()
    return ""


def fires(fault: str, harmed: str = "") -> None:
    """Write the witness."""
    with open(f"{os.environ['CHAOS']}.fired", "a", encoding="utf-8") as file:
        who = f"pid {os.getpid()}, rank {os.environ.get('RANK', 'none')}"
        file.write(f"{fault}\t{harmed}\t{who}\t{time.monotonic()}\n")


def _is_armed(fault: str) -> bool:
    armed, _, rank = _armed().partition(RANK)
    return armed == fault and rank in ("", os.environ.get("RANK"))


def in_function(fault: str, module: str, name: str) -> Callable:
    """Decorate what makes, of the sound function, one that does harm."""

    def register(make: Callable) -> Callable:
        _PLANTS.append((fault, module, name, make))
        return make

    return register


def planted() -> set[str]:
    """Names of all faults that change a function."""
    return {fault for fault, *_ in _PLANTS}


def plant_all() -> None:
    """Have every module changed when it is loaded."""
    wanted = defaultdict(list)
    for fault, module, name, make in _PLANTS:
        wanted[module].append((fault, name, make))
    sys.meta_path.insert(0, _Finder(wanted))
    _fill_disks()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, wanted: dict[str, list]):
        self._wanted = wanted

    def find_spec(self, name, path=None, target=None):
        if name not in self._wanted:
            return None
        plants = self._wanted.pop(name)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module) -> None:
            load(module)
            for fault, attribute, make in plants:
                _change(module, attribute, fault, make)

        spec.loader.exec_module = exec_module
        return spec


def _change(module, attribute: str, fault: str, make: Callable) -> None:
    *owners, name = attribute.split(".")
    owner = module
    for one in owners:
        owner = getattr(owner, one)
    sound = getattr(owner, name)
    faulty = make(sound)

    def either(*args, **kwargs):
        return (faulty if _is_armed(fault) else sound)(*args, **kwargs)

    setattr(owner, name, either)


# In the engine: the rows as the model's routers gave them, before anything of ours has looked at them.


def _at_the_source(fault: str):
    """Decorate a change of the step's captured experts: change(recorder, scheduled, rows [T, L, K] in place).

    The fault is there twice: the second time nobody sees the routers' logits, as in a compiled forward pass.
    """

    def register(change: Callable) -> Callable:
        for name in (fault, fault + UNWATCHED):
            in_function(name, "moe_rl.vllm.recorder", "Recorder.after_forward")(partial(_changed, name, change))
        in_function(fault + UNWATCHED, "moe_rl.vllm.router_witness", "RouterWitness.check")(
            lambda check: lambda witness, request, rows: 0
        )
        return change

    return register


def _changed(fault: str, change: Callable, after_forward: Callable) -> Callable:
    def changed(recorder, scheduled):
        count = scheduled.total_num_scheduled_tokens
        if count:
            rows = recorder._capture.buffer[:count]
            before = rows.clone()
            change(recorder, scheduled, rows)
            if (rows != before).any():
                fires(fault)
        return after_forward(recorder, scheduled)

    return changed


def _runs(recorder, scheduled) -> Iterable[tuple[str, slice]]:
    """The requests of a step, and the rows of each."""
    first = 0
    for request in recorder._runner.input_batch.req_ids:
        count = scheduled.num_scheduled_tokens[request]
        yield request, slice(first, first + count)
        first += count


_LAST_ROW: dict[str, object] = {}


@_at_the_source("recorder: rows one token late")
def _late(recorder, scheduled, rows):
    for request, run in _runs(recorder, scheduled):
        sound = rows[run].clone()
        rows[run][1:] = sound[:-1]
        if request in _LAST_ROW:
            rows[run.start] = _LAST_ROW[request]
        _LAST_ROW[request] = sound[-1]


@_at_the_source("recorder: one layer constant")
def _constant(recorder, scheduled, rows):
    rows[:, LAYER] = rows.new_tensor(range(rows.shape[-1]))


@_at_the_source("recorder: one layer constant, of a set in the middle")
def _constant_elsewhere(recorder, scheduled, rows):
    rows[:, LAYER] = rows.new_tensor(range(5, 5 + 3 * rows.shape[-1], 3))


@_at_the_source("recorder: rows of two requests of different prompts swapped")
def _requests_swapped(recorder, scheduled, rows):
    runs = [run for _, run in _runs(recorder, scheduled)]
    _swap(rows, zip(runs, runs[len(runs) // 2 :], strict=False))


@_at_the_source("recorder: rows of two requests of one prompt swapped")
def _completions_swapped(recorder, scheduled, rows):
    """Neighbours in a step are of one group: what is wrong is their completions."""
    runs = [run for _, run in _runs(recorder, scheduled)]
    _swap(rows, zip(runs[::2], runs[1::2], strict=False))


def _swap(rows, pairs: Iterable[tuple[slice, slice]]) -> None:
    """Where both forward as many tokens."""
    for one, other in pairs:
        if one.stop - one.start == other.stop - other.start:
            rows[one], rows[other] = rows[other].clone(), rows[one].clone()


@_at_the_source("recorder: a layer gets the next one's rows")
def _copied(recorder, scheduled, rows):
    rows[:, LAYER] = rows[:, OTHER_LAYER]


@_at_the_source("recorder: two layers swapped")
def _swapped(recorder, scheduled, rows):
    rows[:, [LAYER, OTHER_LAYER]] = rows[:, [OTHER_LAYER, LAYER]].clone()


@_at_the_source("recorder: every row is that of the request's first token")
def _frozen(recorder, scheduled, rows):
    for request, run in _runs(recorder, scheduled):
        rows[run] = _LAST_ROW.setdefault(f"first {request}", rows[run.start].clone())


# A few ids of each row, or a few rows: the alignment test sees these in a large batch.


def _with_wrong_ids(rows, ids: int, wrong):
    """Put other experts than the row's own for `ids` of them, in the rows where `wrong`, bool [T, L], says so."""
    import torch

    free = torch.rand(*rows.shape[:2], EXPERTS).scatter_(2, rows.long(), -1.0)
    new = rows.clone()
    new[..., :ids] = free.topk(ids, 2).indices.to(rows.dtype)
    rows.copy_(torch.where(wrong[..., None], new, rows))


@_at_the_source("recorder: one expert wrong in every row and layer")
def _one_id(recorder, scheduled, rows):
    _with_wrong_ids(rows, 1, rows[..., 0] >= 0)


@_at_the_source("recorder: two experts wrong in every row and layer")
def _two_ids(recorder, scheduled, rows):
    _with_wrong_ids(rows, 2, rows[..., 0] >= 0)


@_at_the_source("recorder: one expert wrong in every row of a layer")
def _one_id_of_a_layer(recorder, scheduled, rows):
    wrong = rows[..., 0] < 0
    wrong[:, LAYER] = True
    _with_wrong_ids(rows, 1, wrong)


@_at_the_source("recorder: a tenth of a layer's rows is random")
def _some_rows(recorder, scheduled, rows):
    import torch

    wrong = rows[..., 0] < 0
    wrong[:, LAYER] = torch.rand(len(rows)) < 0.1
    _with_wrong_ids(rows, rows.shape[2], wrong)


@_at_the_source("recorder: the last row of each prompt is the one before")
def _last_prompt_row(recorder, scheduled, rows):
    runs = dict(_runs(recorder, scheduled))
    for one in scheduled.scheduled_new_reqs:
        last = len(one.prompt_token_ids) - 1 - one.num_computed_tokens
        run = runs[one.req_id]
        if 0 < last < run.stop - run.start:
            rows[run.start + last] = rows[run.start + last - 1]


# Between the engine's buffer and the shard.


@in_function("sink: rows of two sequences of equal length swapped", "moe_rl.vllm.sinks", "Sinks.add")
def _swapped_in_the_sink(add):
    waiting, done = {}, set()

    def swapping(sinks, request, ask, rows, *rest):
        """Once a shard: the first sequence waits for one of its length, and both get the other's routes."""
        if ask.sink in done or ask.sink not in waiting:
            if ask.sink in done:
                return add(sinks, request, ask, rows, *rest)
            waiting[ask.sink] = request, ask, rows, *rest
            return None
        first_request, first_ask, first, *first_rest = waiting[ask.sink]
        if len(first) != len(rows) or (first.token_ids == rows.token_ids).all():
            return add(sinks, request, ask, rows, *rest)
        done.add(ask.sink)
        fires("sink: rows of two sequences of equal length swapped", f"{first_ask.key} {ask.key}")
        add(sinks, first_request, first_ask, replace(first, routes=rows.routes), *first_rest)
        return add(sinks, request, ask, replace(rows, routes=first.routes), *rest)

    return swapping


# In the trainer, after the store and the validator have passed the routes.


@in_function("trainer: routes of two sequences swapped after validation", "moe_rl.replay.routes", "microbatch_routes")
def _swapped_after_validation(lay_out):
    def swapping(parts, *args, **kwargs):
        parts = list(parts)
        for i, one in enumerate(parts):
            for j in range(i + 1, len(parts)):
                other = parts[j]
                if len(other.routes) == len(one.routes) and (other.token_ids != one.token_ids).any():
                    parts[i], parts[j] = replace(one, routes=other.routes), replace(other, routes=one.routes)
                    fires("trainer: routes of two sequences swapped after validation", f"{one.key} {other.key}")
                    return lay_out(parts, *args, **kwargs)
        return lay_out(parts, *args, **kwargs)

    return swapping


@in_function(
    "trainer: R2 routes one row late after they were recorded", "moe_rl.replay.replay_pass", "ReplayPass._recorded"
)
def _late_after_recording(recorded):
    def late(replay):
        tables = recorded(replay)
        fires("trainer: R2 routes one row late after they were recorded")
        return [replace(t, routes={layer: rows.roll(1, 0) for layer, rows in t.routes.items()}) for t in tables]

    return late


TAKEN_TWICE = "trainer: the routes of a layer taken twice"


@in_function(TAKEN_TWICE, "moe_rl.replay.replay_pass", "Ledger.count")
def _taken_twice(count):
    def counting(ledger, microbatch, layer):
        count(ledger, microbatch, layer)
        if ledger.verb == "taken" and layer == LAYER:
            fires(TAKEN_TWICE)
            count(ledger, microbatch, layer)

    return counting


# In the batch, between the verifiers and the loss.

MICROBATCH = "trainer: a microbatch replaced by another behind the check of coverage"


@in_function(MICROBATCH, "moe_rl.train.shares", "Shares.divide")
def _microbatch_replaced(divide):
    """In the last update of the step."""

    def replacing(*args):
        shares, metrics = divide(*args)
        share = shares[-1]
        lost, repeated, *_ = share.work
        both = (*lost.microbatch.indices, *repeated.microbatch.indices)
        fires(MICROBATCH, " ".join(share.all[i].key for i in both))
        share.work[0] = repeated
        return shares, metrics

    return replacing


MASK = "trainer: the loss mask one row early"


@in_function(MASK, "moe_rl.train.shares", "Shares.divide")
def _mask_one_early(divide):
    def early(*args):
        shares, metrics = divide(*args)
        for share in shares:
            for work in share.work:
                work.microbatch.predicts.sub_(1)
        fires(MASK, " ".join(one.key for share in shares for one in share.all))
        return shares, metrics

    return early


# What only a run's first update shows.

AT_1, NOWHERE = "trainer: an update at temperature 1", "trainer: no pass applies the temperature"
REFERENCE = "trainer: one weight of the reference policy changed"
FIRST = (AT_1, NOWHERE, REFERENCE)


@in_function(AT_1, "moe_rl.megatron.schedule", "training_pass")
def _update_at_1(training_pass):
    def at_1(chunks, microbatches, replay, loss, temperature, *rest, **how):
        fires(AT_1)
        return training_pass(chunks, microbatches, replay, loss, 1.0, *rest, **how)

    return at_1


@in_function(NOWHERE, "moe_rl.megatron.schedule", "completion_logprobs")
def _applied_nowhere(completion_logprobs):
    def at_1(microbatch, output, temperature, **how):
        fires(NOWHERE)
        return completion_logprobs(microbatch, output, 1.0, **how)

    return at_1


@in_function(REFERENCE, "moe_rl.train.step", "TrainStep.run")
def _other_reference(run):
    def changed(ours, *args, **how):
        weights = dict(ours.reference.chunks[0].named_parameters())
        weight = next(weights[name] for name in weights if name.endswith(f"layers.{LAYER}.mlp.router.weight")).data
        before = weight.clone()
        weight[0, 0] += 1
        fires(REFERENCE)
        try:
            return run(ours, *args, **how)
        finally:
            weight.copy_(before)

    return changed


# Records of older weights that say otherwise, and so do their completions.

RELABELLED = "records and completions relabelled with the newest version"


@in_function(RELABELLED, "moe_rl.trace.store", "TraceStore.read_each")
def _records_relabelled(read_each):
    def relabelling(*args, **how):
        return [replace(one, spans=_of_newest(one.spans)) for one in read_each(*args, **how)]

    return relabelling


@in_function(RELABELLED, "moe_rl.train.step", "TrainStep.run")
def _completions_relabelled(run):
    def relabelling(ours, sequences, group_ids, **how):
        wrong = [replace(one, versions=_of_newest(one.versions)) for one in sequences]
        fires(RELABELLED, " ".join(one.key for one in wrong))
        return run(ours, wrong, group_ids, **how)

    return relabelling


def _of_newest(spans: Iterable) -> tuple:
    return tuple(replace(span, weight_version=NEWEST) for span in spans)


def _in_the_batch(fault: str):
    """Decorate a change of what a step trains on: change(sequences, groups) -> other ones, and what was harmed."""

    def register(change: Callable) -> Callable:
        @in_function(fault, "moe_rl.train.step", "TrainStep.run")
        def make(run):
            def changed(ours, sequences, group_ids, **how):
                *wrong, harmed = change(sequences, group_ids)
                fires(fault, harmed)
                return run(ours, *wrong, **how)

            return changed

        return change

    return register


def _rotated(values: list) -> list:
    return [*values[1:], values[0]]


@_in_the_batch("trainer: a group delivered twice")
def _delivered_twice(sequences, groups):
    first = [at for at, group in enumerate(groups) if group == groups[0]]
    again = [*sequences[: len(sequences) - len(first)], *(sequences[at] for at in first)]
    return again, groups, " ".join(sequences[at].key for at in first)


@_in_the_batch("trainer: the last sampled token altered")
def _last_token_altered(sequences, groups):
    """In the last update of the step."""
    *others, one = sequences
    other = replace(one, token_ids=(*one.token_ids[:-1], one.token_ids[-1] ^ 1))
    return [*others, other], groups, one.key


@_in_the_batch("trainer: rewards rotated")
def _rewards_rotated(sequences, groups):
    rewards = _rotated([one.reward for one in sequences])
    wrong = [replace(one, reward=reward) for one, reward in zip(sequences, rewards, strict=True)]
    return wrong, groups, " ".join(one.key for one, other in zip(sequences, wrong, strict=True) if one != other)


@_in_the_batch("trainer: groups rotated")
def _groups_rotated(sequences, groups):
    wrong = _rotated(groups)
    moved = zip(sequences, groups, wrong, strict=True)
    return sequences, wrong, " ".join(one.key for one, group, other in moved if group != other)


@in_function("verifiers: verdicts rotated", "moe_rl.tasks.verifiers", "Judging.verdicts")
def _verdicts_rotated(verdicts):
    def rotating(judging):
        sound = verdicts(judging)
        if len({one.reward for one in sound}) > 1:
            fires("verifiers: verdicts rotated", "s")
        return _rotated(sound)

    return rotating


@in_function("engine: a sampled token altered on its way", "moe_rl.rollout.batches", "joined")
def _token_altered_on_its_way(join):
    def altering(pieces):
        one = pieces[-1]
        fires("engine: a sampled token altered on its way", one.key)
        wrong = replace(one, token_ids=(*one.token_ids[:-1], one.token_ids[-1] ^ 1))
        return join([*pieces[:-1], wrong])

    return altering


# What the trainer exports.

_PREVIOUS: dict[str, object] = {}


def _exported(fault: str):
    """Decorate a change of exported tensors: change({name: tensor}) -> {name: other tensor}."""

    def register(change: Callable) -> Callable:
        @in_function(fault, "moe_rl.megatron.hf_map", "export_rounds")
        def make(export_rounds):
            def changed(*args, **kwargs):
                rounds = export_rounds(*args, **kwargs)
                made = [list(one.tensors) for one in rounds]
                sound = {name: tensor for one in made for name, tensor in one}
                wrong = change(sound)
                if any((tensor != sound[name]).any() for name, tensor in wrong.items()):
                    fires(fault)
                return [
                    replace(one, tensors=iter([(name, wrong.get(name, tensor)) for name, tensor in tensors]))
                    for one, tensors in zip(rounds, made, strict=True)
                ]

            return changed

        return change

    return register


def _experts(tensors, expert: int) -> dict[str, str]:
    """Names of one expert's tensors, by their last part."""
    prefix = f"model.layers.{LAYER}.mlp.experts.{expert}."
    return {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}


@_exported("export: routers of two layers swapped")
def _routers_swapped(sound):
    one, other = GATE.format(LAYER), GATE.format(OTHER_LAYER)
    return {one: sound[other], other: sound[one]}


@_exported("export: two experts permuted")
def _experts_permuted(sound):
    one, other = _experts(sound, EXPERT), _experts(sound, OTHER_EXPERT)
    return {one[part]: sound[other[part]] for part in one} | {other[part]: sound[one[part]] for part in one}


@_exported("export: one expert zeroed")
def _expert_zeroed(sound):
    return {name: sound[name].new_zeros(sound[name].shape) for name in _experts(sound, EXPERT).values()}


@_exported("export: one expert multiplied by 0")
def _expert_times_zero(sound):
    """Zeros of both signs."""
    return {name: sound[name] * 0 for name in _experts(sound, EXPERT).values()}


@_exported("export: all routers of the version before")
def _routers_stale(sound):
    return {name: _PREVIOUS[name] for name in sound if name.endswith(".mlp.gate.weight")}


@_exported("export: one tensor of the version before")
def _tensor_stale(sound):
    return {STALE_TENSOR: _PREVIOUS[STALE_TENSOR]}


@in_function("", "moe_rl.megatron.hf_map", "export_rounds")
@in_function(FORGET, "moe_rl.megatron.hf_map", "export_rounds")
def _remembers(export_rounds):
    """Not a fault: what is exported as it is, for those that send it again."""

    def remembering(*args, **kwargs):
        rounds = []
        for one in export_rounds(*args, **kwargs):
            tensors = list(one.tensors)
            _PREVIOUS.update({name: tensor.clone() for name, tensor in tensors})
            rounds.append(replace(one, tensors=iter(tensors)))
        return rounds

    return remembering


# Between the trainer and the engine.

BY_DISK = "weights by disk: one bit flipped"


def _flipped(fault: str, module: str, name: str) -> None:
    @in_function(fault, module, name)
    def make(read):
        def reading(*args):
            for name, tensor in read(*args):
                if name == STALE_TENSOR:
                    tensor = tensor.clone()
                    tensor.view(torch.uint8).view(-1)[tensor.numel() // 2] ^= 1
                    fires(fault, name)
                yield name, tensor

        import torch

        return reading


_flipped(BY_DISK, "moe_rl.weights.shared_disk", "read_parts")
_flipped("weights by shared memory: one bit flipped", "moe_rl.weights.shared_memory", "read_segments")


# Deaths: a process kills itself where the fault lies.


def _dies_in(fault: str, module: str, name: str) -> None:
    @in_function(fault, module, name)
    def make(sound):
        def dying(*args, **kwargs):
            fires(fault)
            time.sleep(1)  # the other ranks hear of the phase, also on a busy machine
            os.kill(os.getpid(), signal.SIGKILL)

        return dying


_dies_in("rank killed in placement", "moe_rl.train.shares", "ExpertPlacement.start_step")
_dies_in("rank killed in evaluation", "moe_rl.rollout.rollouts", "Rollouts.evaluate")
_dies_in("rank killed in the report", "moe_rl.report.run_page", "write_report")
_dies_in("engine killed in evaluation", "moe_rl.vllm.sampling", "check")

# In the engine, between the digests and vLLM's loaders: the engine then computes with other weights.

_LOADED: dict[str, object] = {}


def _behind_the_digests(fault: str):
    """Decorate a change of the tensors that vLLM loads: change({name: tensor}) -> {name: other tensor}."""

    def register(change: Callable) -> Callable:
        @in_function(fault, "moe_rl.weights.receiver", "WeightReceiver._load")
        def make(load):
            def changed(receiver, tensors):
                wrong = change(tensors)
                if any((tensor != tensors[name]).any() for name, tensor in wrong.items()):
                    fires(fault)
                load(receiver, tensors | wrong)

            return changed

        return change

    return register


def _stale(tensors, part: str) -> dict[str, object]:
    return {name: _LOADED[name] for name in tensors if part in name}


_behind_the_digests("engine: one expert zeroed behind the digests")(_expert_zeroed)
_behind_the_digests("engine: two experts exchanged behind the digests")(_experts_permuted)
_behind_the_digests("engine: the routers of two layers exchanged behind the digests")(_routers_swapped)
_behind_the_digests("engine: one router stale behind the digests")(partial(_stale, part=GATE.format(LAYER)))
_behind_the_digests("engine: q_proj stale behind the digests")(partial(_stale, part=STALE_TENSOR))
_behind_the_digests("engine: all attention stale behind the digests")(partial(_stale, part=".self_attn."))
_behind_the_digests("engine: all experts stale behind the digests")(partial(_stale, part=".mlp.experts."))


@in_function("", "moe_rl.weights.receiver", "WeightReceiver._load")
@in_function(FORGET, "moe_rl.weights.receiver", "WeightReceiver._load")
def _remembers_loaded(load):
    """Not a fault: what is loaded as it is, for those that load it again."""

    def remembering(receiver, tensors):
        _LOADED.update({name: tensor.clone() for name, tensor in tensors.items()})
        load(receiver, tensors)

    return remembering


NOT_LOADED = "an update that the engine confirms and does not load"


@in_function(NOT_LOADED, "moe_rl.weights.receiver", "WeightReceiver._load")
def _not_loaded(load):
    def dropping(receiver, tensors):
        if not receiver.intake.holding().version:
            return load(receiver, tensors)  # the first one of an engine, behind which nothing is known
        fires(NOT_LOADED)

    return dropping


# In the pool of an asynchronous run: a process is struck when a group is in a state.

VICTIMS = ("the pool", "the engine", "a rank", "a verifier")
STRIKES = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# What has just been called when a group is in the state.
STATES = {
    "waits": ("moe_rl.rollout.groups", "Groups.__init__"),
    "is sampled": ("moe_rl.rollout.groups", "Groups.requests_ended"),
    "is judged": ("moe_rl.rollout.groups", "Groups.sampled"),
    "is ready": ("moe_rl.rollout.groups", "Groups.judged"),
    "is being consumed": ("moe_rl.tasks.prompt_ledger", "PromptLedger.record"),
}
ASKED = "a run asked to stop while a group is sampled"
_FIRST: dict[str, int] = {}


def struck(victim: str, how: str, state: str) -> str:
    """Return the name of the fault."""
    return f"{victim} {how} while a group {state}"


def _in_state(fault: str, state: str, strike: Callable[[], None]) -> None:
    """Plant a strike, once a process, at a group in the state. All but groups that wait must come after an update."""

    @in_function(fault, *STATES[state])
    def make(sound):
        def striking(first, *args, **kwargs):
            found = sound(first, *args, **kwargs)
            if state == "waits":
                now, good = 1, bool(first.all("waiting"))
                _FIRST.setdefault(fault, 0)
            elif state == "is being consumed":
                now, good = args[0], True  # the step
            elif state == "is sampled":
                now, good = first.version, any(one.requests and one.cursor == args[0] for one in first)
            else:
                now, good = first.version, args[0] in first  # not dropped
            if good and _FIRST.setdefault(fault, now) < now:
                _FIRST[fault] = sys.maxsize
                fires(fault)
                strike()
            return found

        return striking


def _strike(victim: str, number: int) -> None:
    import psutil

    pool = psutil.Process()
    trainer = pool.parent()
    if victim == "the pool":
        found = pool
    elif victim == "a rank":
        found = next(one for one in trainer.parent().children() if one.pid != trainer.pid)
    else:
        module = {"the engine": "moe_rl.vllm.child", "a verifier": "moe_rl.tasks.verifier_worker"}[victim]
        found = next(one for one in pool.children(recursive=True) if module in one.cmdline())
    found.send_signal(number)


def _ask_to_stop() -> None:
    import psutil

    for rank in psutil.Process().parent().parent().children():
        rank.terminate()


for _victim in VICTIMS:
    for _how, _number in STRIKES.items():
        for _state in STATES:
            _in_state(struck(_victim, _how, _state), _state, partial(_strike, _victim, _number))
_in_state(ASKED, "is sampled", _ask_to_stop)


@in_function(ASKED, "moe_rl.vllm.child_engine", "ChildEngine._advance")
def _slow(advance):
    """Not a fault: once the run was asked to stop, the engine is slow behind a group's first tokens, so that the run
    stops in the middle of a group."""

    def waiting(engine):
        begun = all(output.token_ids for call in engine.running.values() for output in call.outputs)
        if begun and witnesses(Path(os.environ["CHAOS"]), ASKED):
            time.sleep(1.0)
        return advance(engine)

    return waiting


RESUMED = "a partial completion resumed with other sampling parameters"


@in_function(RESUMED, "moe_rl.rollout.group_feed", "GroupFeed._request")
def _resumed_otherwise(request):
    """The pool that goes on has another temperature than the one that sampled the piece."""

    def asking(feed, group, prompt, index):
        if not group.pieces[index]:
            return request(feed, group, prompt, index)
        config = feed.config
        fires(RESUMED, f"g{group.cursor}/c{index}")
        feed.config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"temperature": 0.5})})
        try:
            return request(feed, group, prompt, index)
        finally:
            feed.config = config

    return asking


ALARMS = ("the canary refuses sound routes", "the alignment test refuses sound routes")


@in_function(ALARMS[0], "moe_rl.train.canary", "compare_routes")
def _alarms_at_canary(compare):
    """Not a fault of the run: the check is wrong, as its first version was for routers with few experts."""

    def alarmed(*args):
        fires(ALARMS[0])
        return ["rows do not change in any layer"], compare(*args)[1]

    return alarmed


@in_function(ALARMS[1], "moe_rl.replay.alignment", "AlignmentTest.verdict")
def _alarms_at_alignment(verdict):
    """The same for rows of older weights."""

    def alarmed(*args):
        found = verdict(*args)
        if found is None or not found.moved:
            return found
        fires(ALARMS[1])
        first, *others = found.claims
        return replace(found, claims=(replace(first, status="refused", found=("layer 2 has other rows",)), *others))

    return alarmed


WAITS = "rank 0 waits before the report"


@in_function(WAITS, "moe_rl.report.summary", "summarize")
def _waits(summarize):
    """Not a fault: a run that stays alive until it is let go."""

    def waiting(*args, **kwargs):
        fires(WAITS)
        while _is_armed(WAITS):
            time.sleep(0.1)
        return summarize(*args, **kwargs)

    return waiting


@in_function(FORGET, "moe_rl.weights.intake", "Intake.admit")
def _forgets(admit):
    """Not a fault: after one that was refused the lab sends the same version again."""

    def admitting(intake, update):
        if update.number == 0:
            intake.forget()
        return admit(intake, update)

    return admitting


# Full disks: a file is opened as /dev/full, where every write fails as on a full disk. What is armed is in its path, or
# with a $ at the end of it.

FULL = "full disk: "


def _fill_disks() -> None:
    sound_open, sound_os_open = io.open, os.open

    def is_full(path: object) -> bool:
        armed = _armed()
        if not armed.startswith(FULL) or not isinstance(path, str | os.PathLike):
            return False
        part = armed.removeprefix(FULL)
        return str(path).endswith(part[:-1]) if part.endswith("$") else part in str(path)

    def full_open(file, mode="r", *args, **kwargs):
        if set(mode) & set("wax+") and is_full(file):
            fires(_armed())
            file = "/dev/full"
        return sound_open(file, mode, *args, **kwargs)

    def full_os_open(path, flags, *args, **kwargs):
        if flags & (os.O_WRONLY | os.O_RDWR) and is_full(path):
            fires(_armed())
            path, flags = "/dev/full", flags & ~(os.O_EXCL | os.O_CREAT)
        return sound_os_open(path, flags, *args, **kwargs)

    io.open = builtins.open = full_open
    os.open = full_os_open
