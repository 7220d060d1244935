"""Lists the planted faults: what is harmed, who notices it, what the message says, how soon, and what follows.

`make generated` writes docs/generated/chaos.md from this list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tests.chaos.plants import (
    ASKED,
    AT_1,
    EXPERT,
    LAYER,
    MASK,
    MICROBATCH,
    NOT_LOADED,
    NOWHERE,
    OTHER_EXPERT,
    OTHER_LAYER,
    REFERENCE,
    RELABELLED,
    RESUMED,
    STALE_TENSOR,
    STATES,
    STRIKES,
    TAKEN_TWICE,
    UNWATCHED,
    VICTIMS,
    struck,
)

BEFORE_UPDATE = "in that step, before its first update"
BEFORE_FIRST_UPDATE = "before the run's first update"
BEFORE_SAMPLING = "in that step, before anything is sampled"
AT_ONCE = "when the data is read"
AT_RESUME = "at --resume"
SECOND_RESUME = "a second --resume of a run that is still running"
AT_START = "before any process starts"
SECONDS = 60
"""The most seconds from a fault to the end of the run's last process."""
WITHIN = f"within {SECONDS} s"
RESUMES = "the run resumes and ends bit for bit as without the fault"
MENDED = "no weight moved; the step succeeds once the fault is removed"
ENDS_ONCE = "the run resumes; every prompt ends exactly once, and no group is too old"
REFUSED = "refused"

# Where a fault is planted: in one of the scenes of this folder, or in a test of its own.
Scene = Literal["lab", "large lab", "layouts", "chain", "flight", "second", "folder", "tests"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Describes a planted fault.

    name: its name in `plants.py`. promise: the promises of docs/generated/chaos.md that it tests. planted: process and
    place. notices: who refuses it. error: class of the error, "" where the run does not end. says: what the message
    must contain; "{run}" stands for the run's folder. names_harmed: the message must also name one of the harmed
    things. status: exit status of the rank that reports. soon, after: in words. tests: node ids, for the scene "tests".
    """

    name: str
    promise: str
    planted: str
    notices: str
    error: str
    says: tuple[str, ...]
    soon: str
    after: str
    scene: Scene
    names_harmed: bool = False
    status: int = 2
    tests: tuple[str, ...] = ()


def _in_lab(name: str, promise: str, planted: str, notices: str, error: str, *says: str,
            soon: str = BEFORE_UPDATE, **more) -> Fault:  # fmt: skip
    return Fault(name, promise, planted, notices, error, says, soon, MENDED, "lab", **more)


def _at_first(name: str, planted: str, notices: str, *says: str) -> Fault:
    return _in_lab(name, "P16", planted, notices, "ReplayError", *says, soon=BEFORE_FIRST_UPDATE)


def _in_large_lab(what: str, *says: str) -> Fault:
    name = f"recorder: {what}{UNWATCHED}"
    given = (_ALIGNMENT, "ReplayError", (_OTHER_ROWS, *says), BEFORE_UPDATE, MENDED, "large lab")
    return Fault(name, "P7", _BUFFER, *given)


def _exported(name: str, *says: str) -> Fault:
    planted = "trainer: the exported tensors"
    return Fault(name, "P6", planted, _CONSERVATION, "WeightSyncError", says, BEFORE_SAMPLING, MENDED, "lab")


def _carried(name: str, planted: str) -> Fault:
    says = ("The sampler got other weights than were sent", STALE_TENSOR)
    return Fault(name, "P6", planted, "engine, by digest", "WeightSyncError", says, BEFORE_SAMPLING, MENDED, "lab")


def _in_chain(name: str, promise: str, planted: str, notices: str, error: str, *says: str, **more) -> Fault:
    return Fault(name, promise, planted, notices, error, (*says, "--resume {run}"), WITHIN, RESUMES, "chain", **more)


def _by(name: str, promise: str, planted: str, notices: str, error: str, says: str, soon: str, after: str, *tests):
    return Fault(name, promise, planted, notices, error, (says,), soon, after, "tests", tests=tests)


_BUFFER = "engine: buffer of the step's experts, behind the routers"
_ALIGNMENT = "scores of the trainer's routers for the recorded experts"
_VALIDATOR = "validator"
_LEFT = "are not those that left the sampler's engine"
_CHECKSUM = "checksum made in the engine's buffer, checked at the dispatcher"

_AT_LOGITS = "recorder, which compares some rows with the routers' logits"
_NOT_CHOSEN = "A row is not what the router chose by its logits"
_OTHER_ROWS = "recorded routes belong to other rows"
_WORSE = "records fit their rows far worse than in the last steps"
ROUTES = (
    *(
        _in_lab(name, "P7", _BUFFER, _AT_LOGITS, "RequestRefused", _NOT_CHOSEN, "request s")
        for name in (
            "recorder: rows one token late",
            "recorder: rows of two requests of different prompts swapped",
            "recorder: rows of two requests of one prompt swapped",
            "recorder: two layers swapped",
            "recorder: every row is that of the request's first token",
        )
    ),
    *(
        _in_lab(name, "P7", _BUFFER, _AT_LOGITS, "RequestRefused", _NOT_CHOSEN, f"layer {LAYER}")
        for name in (
            "recorder: one layer constant",
            "recorder: one layer constant, of a set in the middle",
            "recorder: a layer gets the next one's rows",
        )
    ),
    # These faults must be found without the routers' logits.
    *(
        _in_lab(f"recorder: {what}{UNWATCHED}", "P7", _BUFFER, _ALIGNMENT, "ReplayError", _OTHER_ROWS, *says)
        for what, *says in (
            (
                "rows one token late",
                "have rows 1 token too late",
                "No weights were updated",
                "lr 0.0001, staleness 0, power ",
            ),
            ("one layer constant, of a set in the middle", f"layer {LAYER} has rows that match nothing"),
            ("rows of two requests of different prompts swapped", _WORSE),
            ("rows of two requests of one prompt swapped", _WORSE),
            (
                "two layers swapped",
                f"layer {LAYER} has the rows of layer {OTHER_LAYER}",
                f"layer {OTHER_LAYER} has the rows of layer {LAYER}",
            ),
        )
    ),
    *(
        _in_large_lab(*given)
        for given in (
            ("one expert wrong in every row and layer", "1 of 4 recorded experts are wrong in every row"),
            ("two experts wrong in every row and layer", "2 of 4 recorded experts are wrong in every row"),
            ("one expert wrong in every row of a layer", f"layer {LAYER}: 1 of 4 recorded experts are wrong"),
            ("a tenth of a layer's rows is random", f"layer {LAYER} has some rows that match nothing"),
            ("the last row of each prompt is the one before", "the row before in their last prompt row"),
        )
    ),
    *(
        _in_lab(f"recorder: {what}{UNWATCHED}", "P7", _BUFFER, _VALIDATOR, "RouteValidationError", *says)
        for what, *says in (
            ("one layer constant", "a layer has the same routes for every token", f"layer {LAYER}", "got [0, 1, 2, 3]"),
            (
                "a layer gets the next one's rows",
                "two layers have the same routes",
                f"layers {LAYER} and {OTHER_LAYER}",
            ),
            ("every row is that of the request's first token", "routes are the same for every token", "request s"),
        )
    ),
    _in_lab(
        "sink: rows of two sequences of equal length swapped", "P7", "engine: between the KV slots and the shard",
        _CHECKSUM, "ReplayError", _LEFT, names_harmed=True,
    ),
    _in_lab(
        "trainer: routes of two sequences swapped after validation", "P7",
        "trainer: after the validator, before the tables are made", _CHECKSUM, "ReplayError",
        _LEFT, names_harmed=True,
    ),
    _in_lab(
        TAKEN_TWICE, "P7", "trainer: where a router takes its routes", "the pass's ledger", "ReplayError",
        "routes were not taken exactly once", f"layer {LAYER} forward 2 times",
    ),
)  # fmt: skip

_BATCH, _ACCOUNT = "trainer: the batch, at the step's beginning", "the step's account of its sequences"
_TWICE, _NOT_AS_SAMPLED, _OTHER_VERDICT = (
    "a sequence was delivered more than once",
    "learned from something other than what was sampled and judged",
    "does not have the reward and the group that it was judged",
)
_AT_TWO = "comparison of both sides at two temperatures"
BATCH = (
    _in_lab(
        MICROBATCH, "P16", "trainer: a rank's share of the step's last update", _ACCOUNT, "ReplayError",
        "did not learn from each of its sequences exactly once", names_harmed=True,
    ),
    _in_lab(
        MASK, "P16", "trainer: the microbatches of a step", _ACCOUNT, "ReplayError", _NOT_AS_SAMPLED, names_harmed=True
    ),
    _in_lab(
        "trainer: a group delivered twice", "P16", _BATCH, _ACCOUNT, "ReplayError", _TWICE, names_harmed=True,
    ),
    _in_lab(
        "trainer: the last sampled token altered", "P16", f"{_BATCH}, for the last update", _ACCOUNT, "ReplayError",
        _NOT_AS_SAMPLED, names_harmed=True,
    ),
    _in_lab("trainer: rewards rotated", "P16", _BATCH, _ACCOUNT, "ReplayError", _OTHER_VERDICT, names_harmed=True),
    _in_lab("trainer: groups rotated", "P16", _BATCH, _ACCOUNT, "ReplayError", _OTHER_VERDICT, names_harmed=True),
    _in_lab(
        "verifiers: verdicts rotated", "P16", "rank 0: the verdicts of a step", "rank 0", "RewardError",
        "a verdict belongs to another completion", "request s",
    ),
    _in_lab(
        "engine: a sampled token altered on its way", "P16", "rank 0: a completion, before it is judged", "rank 0",
        "RewardError", "a completion was changed after sampling", "request s",
    ),
    _at_first(
        AT_1, "trainer: the pass of an update", _AT_TWO,
        "rollout.temperature", "the trainer's log-probabilities are those of temperature 1",
    ),
    _at_first(
        NOWHERE, "trainer: all passes", _AT_TWO,
        "rollout.temperature", "the temperature changes no log-probability of the trainer",
    ),
    _at_first(
        REFERENCE, "trainer: a router of the reference policy", "comparison with the policy's weights",
        "the reference policy does not have the weights that the run began with",
        f"layers.{LAYER}.mlp.router.weight", "1 of ",
    ),
)  # fmt: skip

_SWAPPED = "trainer: routes of two sequences swapped after validation"
LAYOUTS = (
    *(
        Fault(
            f"{_SWAPPED} ({layout})", "P7, P11", "both ranks: before the tables are made", _CHECKSUM, "ReplayError",
            (_LEFT,),
            BEFORE_UPDATE, MENDED, "layouts", names_harmed=True,
        )
        for layout in ("TP 2", "CP 2", "PP 2", "EP 2")
    ),
    Fault(
        "trainer: R2 routes one row late after they were recorded (R2)", "P7",
        "both ranks: between recording and replay",
        _CHECKSUM, "ReplayError", ("dispatched to other experts than recorded",), BEFORE_UPDATE, MENDED, "layouts",
    ),
    Fault(
        f"{RELABELLED} (async)", "P7", "both ranks: what they read of a batch of older weights", _CHECKSUM,
        "ReplayError", (_LEFT,), BEFORE_UPDATE, MENDED, "layouts", names_harmed=True,
    ),
)  # fmt: skip

_READ_BACK, _ELSE = "engine, by sums over what its layers compute with", "vLLM computes with other weights"


def _computed(name: str, *says: str) -> Fault:
    planted = "engine: behind the digests, before vLLM loads"
    says = (_ELSE, *says)
    return Fault(f"engine: {name} behind the digests", "P6", planted, _READ_BACK, "WeightSyncError", says,
                 BEFORE_SAMPLING, MENDED, "lab")  # fmt: skip


ENGINE_WEIGHTS = (
    _computed("one expert zeroed", f"layer {LAYER}, expert {EXPERT}, down_proj.weight: only zeros"),
    _computed(
        "two experts exchanged",
        f"layer {LAYER}, expert {EXPERT}, down_proj.weight: what layer {LAYER}, expert {OTHER_EXPERT}, down_proj",
    ),
    _computed(
        "the routers of two layers exchanged",
        f"layer {LAYER}, mlp.gate.weight: what layer {OTHER_LAYER}, mlp.gate.weight is",
    ),
    _computed("one router stale", f"layer {LAYER}, mlp.gate.weight: stale, what it was in version "),
    _computed("q_proj stale", f"layer {LAYER}, self_attn.q_proj.weight: stale, what it was in version "),
    _computed("all attention stale", "layer 0, self_attn.k_proj.weight: stale, what it was in version "),
    _computed("all experts stale", "layer 0, expert 0, down_proj.weight: stale, what it was in version "),
)
"""Faults of the engine's weights that no digest can show."""

_CONSERVATION = "rank 0, by sums over exported and held weights"
WEIGHTS = (
    _exported(
        "export: routers of two layers swapped",
        f"layer {LAYER}, mlp.gate.weight: what layer {OTHER_LAYER}, mlp.gate.weight is",
    ),
    _exported(
        "export: two experts permuted",
        f"layer {LAYER}, expert {EXPERT}, down_proj.weight: what layer {LAYER}, expert {OTHER_EXPERT}, down_proj",
    ),
    _exported("export: one expert zeroed", f"layer {LAYER}, expert {EXPERT}, down_proj.weight: only zeros"),
    _exported("export: one expert multiplied by 0", f"layer {LAYER}, expert {EXPERT}, down_proj.weight: only zeros"),
    _exported("export: all routers of the version before", "mlp.gate.weight: stale, what it was in version "),
    _exported(
        "export: one tensor of the version before",
        f"layer {LAYER}, self_attn.q_proj.weight: stale, what it was in version ",
    ),
)
WEIGHTS += (
    *ENGINE_WEIGHTS,
    _carried("weights by shared memory: one bit flipped", "engine: in the segment of shared memory"),
    _carried("weights by disk: one bit flipped", "engine: in the file on the shared disk"),
)
_FULL = "No space left on device"
CHAIN = (
    _in_chain(
        "engine killed in evaluation", "P5", "engine: in the first call to sample", "rank 0", "SamplerGone", "SIGKILL",
        status=3,
    ),
    _in_chain("full disk: metrics.jsonl", "P2", "rank 0: the metrics log", "rank 0", "", _FULL, "metrics.jsonl"),
    _in_chain("full disk: /trace/", "P2", "engine: the trace shard of a step", "engine", "", _FULL, "step000001"),
    _in_chain("full disk: rollouts/step", "P2", "rank 0: the rollout file", "rank 0", "", _FULL, "step000001"),
    _in_chain("full disk: prompts.jsonl$", "P2", "rank 0: the prompt ledger", "rank 0", "", _FULL, "prompts.jsonl"),
    _in_chain(
        "full disk: state.json", "P2", "rank 0: state.json of a checkpoint", "all ranks", "CheckpointError", _FULL,
        "checkpoints/step-000001",
    ),
    _in_chain(
        "rank killed in placement on rank 1", "P4", "rank 1: before experts are placed", "rank 0", "", "rank 1 (pid ",
        "in phase train (placement) of step ", "died", status=3,
    ),
    _in_chain(
        "rank killed in evaluation", "P4", "rank 0: in an evaluation", "rank 1", "", "rank 0 (pid ",
        "in phase evaluate (eval) of step 2", "died", status=3,
    ),
    _in_chain(
        "rank killed in the report", "P4", "rank 0: before report.html is written", "rank 1", "", "rank 0 (pid ",
        "in phase report of step 3", "died", status=3,
    ),
)  # fmt: skip


def _flies(victim: str, how: str, state: str) -> Fault:
    """A process of an asynchronous run that is struck when a group is in a state."""
    name, planted = struck(victim, how, state), "pool: where the group enters the state"
    if victim == "a verifier":
        after = f"it is replaced; {ENDS_ONCE.partition('; ')[2]}"
        return Fault(name, "P5, P8", planted, "pool", "", (), "n/a", after, "flight")
    promise, notices, error, *says = {
        "the pool": ("P5, P3", "rank 0", "SamplerGone", "The pool"),
        "the engine": ("P5, P3", "pool", "SamplerGone", "The vLLM engine"),
        "a rank": ("P4, P3", "rank 0", "", "rank 1 (pid "),
    }[victim]
    if victim != "a rank":
        says = [*says, "SIGKILL" if how == "killed" else "hangs"]
    return Fault(name, promise, planted, notices, error, (*says, "--resume {run}"), WITHIN, ENDS_ONCE, "flight",
                 status=3)  # fmt: skip


def _in_flight() -> Iterator[Fault]:
    """Yield every strike, in the order in which one run can meet them.

    Groups wait, with pieces, only at the start of a run that was asked to stop. No verifier has begun to work then.
    """
    yield Fault(
        ASKED, "P15, P3", "pool: SIGTERM to all ranks", "all ranks", "", ("asked to stop", "--resume {run}"),
        "within checkpoint.grace_seconds", f"what was sampled is kept; {ENDS_ONCE}", "flight", status=5,
    )  # fmt: skip
    yield Fault(
        RESUMED, "P16, P3", "pool: where it goes on with a piece", "pool", "PipelineError",
        ("tokens were drawn with other sampling parameters", "got temperature 1, ", "--resume {run}"),
        "before it is sampled further", ENDS_ONCE, "flight",
    )  # fmt: skip
    for state in STATES:
        for victim in VICTIMS:
            for how in STRIKES:
                if (victim, state) != ("a verifier", "waits"):
                    yield _flies(victim, how, state)
    yield Fault(
        NOT_LOADED, "P6", "engine: behind the digests, before vLLM loads", _READ_BACK, "WeightSyncError",
        (_ELSE, "--resume {run}"), "behind the update", ENDS_ONCE, "flight",
    )  # fmt: skip


FLIGHT = tuple(_in_flight())

FOLDER = (
    Fault(
        "metrics.jsonl: a line cut in the middle", "P1", "the run's folder, while no process runs",
        "rank 0, at --resume", "",
        ("the metrics log is damaged", "metrics.jsonl:2"), AT_RESUME, REFUSED, "folder",
    ),
    Fault(
        "metrics.jsonl: the line of a step lost", "P1", "the run's folder, while no process runs",
        "rank 0, at --resume", "",
        ("metrics.jsonl: the lines of 1 steps are lost; the report will lack them: 2",), AT_RESUME, "the run continues",
        "folder",
    ),
    Fault(
        "metrics.jsonl: a digit changed", "P1", "the run's folder, while no process runs", "rank 0, at --resume", "",
        ("the metrics log is damaged", "metrics.jsonl:2"), AT_RESUME, REFUSED, "folder",
    ),
    *(
        Fault(
            f"config.yaml: {key} edited", "P3", "the run's folder, while no process runs", "rank 0, at --resume",
            "", ("the config of a run was changed by hand", f".{key} = {value}"), AT_RESUME, REFUSED, "folder",
        )
        for key, value in (("clip_low", 0.25), ("temperature", 0.75))
    ),
    Fault(
        SECOND_RESUME, "P3", "a second process, while the first one runs", "rank 0 of the second process", "",
        ("the run is still going", "{run}"), "10 s after its start, before it writes anything",
        "the first run continues", "second",
    ),
)  # fmt: skip

# Faults that have tests of their own, outside of this folder.
TESTED = (
    # P1: damage is never read as data
    _by("a shard: every bit flipped, one at a time", "P1", "a shard on disk", "reader", "TraceError",
        "shard and record", AT_ONCE, REFUSED,
        "tests/trace/test_damage.py::test_every_single_bit_flip_is_an_error"),
    _by("a shard: cut at every byte, or longer", "P1", "a shard on disk", "reader", "TraceError", "shard", AT_ONCE,
        "records before the cut can be recovered",
        "tests/trace/test_damage.py::test_every_truncation_and_any_extension_is_an_error",
        "tests/trace/test_recovery.py::test_cut_at_any_byte"),
    _by("a shard: records moved, doubled, dropped, or of another shard", "P1", "a shard on disk", "reader",
        "TraceError",
        "shard and record", AT_ONCE, REFUSED,
        "tests/trace/test_damage.py::test_moved_frames_and_sections_are_refused_even_when_resealed",
        "tests/trace/test_damage.py::test_duplicated_dropped_and_wrong_index_entries_are_refused",
        "tests/trace/test_damage.py::test_splices_from_other_shards_are_refused"),
    _by("trace manifest: every bit flipped, every line cut", "P1", "the store's manifest", "reader", "TraceError",
        "line",
        AT_ONCE, REFUSED,
        "tests/trace/test_manifest.py::test_every_flip_and_cut_of_a_line_is_seen"),
    _by("a kept rollout: bits flipped, bytes cut off", "P1", "rollouts/*.rollout", "rank 0", "DataError", "file",
        AT_ONCE,
        "the step is sampled again",
        "tests/rollout/test_kept.py::test_no_bit_may_flip_and_nothing_may_be_cut_off"),
    _by("prompt ledger: every bit flipped, every byte cut off", "P1, P3", "prompts.jsonl", "rank 0", "DataError",
        "file and line", AT_ONCE, REFUSED,
        "tests/tasks/test_prompt_ledger.py::test_every_bit_flip_is_noticed",
        "tests/tasks/test_prompt_ledger.py::test_every_truncation_is_noticed"),
    _by("the store's manifest lost a line", "P1, P3", "the store, while no process runs", "rank 0", "TraceError",
        "shard and manifest", "before the step is trained on", "the step is sampled again",
        "tests/train/test_resume.py::test_a_shard_whose_line_the_manifest_lost_is_not_taken"),
    _by("a session: a token, log-probability, version or record changed; turns exchanged, moved or lost", "P1",
        "a session that is finished", "reader of the session", "SessionError", "session and turn", AT_ONCE, REFUSED,
        "tests/gateway/test_sessions.py::test_a_changed_turn_is_named",
        "tests/gateway/test_sessions.py::test_turns_that_are_gone_exchanged_or_of_another_session_are_noticed"),
    _by("a session: a turn with a record of other tokens, other weights or another branch, or without one", "P1",
        "a session that is finished", "gateway, against the trace store", "SessionError", "session, turn and fault",
        "when the session is finished, and when it is read", REFUSED,
        "tests/gateway/test_web.py::test_a_record_that_is_not_the_turns_is_named"),
    # P2: durable publish
    _by("shard writer killed at every file system call", "P2", "a process that publishes", "the next reader", "",
        "nothing: it finds the old or the new state", AT_ONCE, "the reader continues",
        "tests/trace/test_crash.py::test_kill_9_at_every_file_system_call"),
    _by("full disk at every size of a shard", "P2", "a process that publishes", "writer", "TraceError",
        "shard, folder, No space left on device", "at the write", "nothing is published or left behind",
        "tests/trace/test_crash.py::test_full_disk_at_every_size"),
    _by("a checkpoint writer that fails or dies", "P2", "one rank, while it writes", "all ranks", "CheckpointError",
        "rank, file, the system's error", "when the checkpoint is published", "the previous checkpoint stays",
        "tests/distributed/test_state.py::test_a_writer_that_fails_or_dies_is_named_on_all_ranks"),
    _by("each file of a checkpoint damaged", "P2, P3", "a checkpoint on disk", "all ranks", "CheckpointError",
        "file, and the checkpoint to use instead", AT_RESUME, REFUSED,
        "tests/distributed/test_state.py::test_a_wrong_checkpoint_is_refused_by_all_ranks_alike",
        "tests/distributed/test_state.py::test_every_file_of_a_checkpoint_is_among_those_that_were_damaged"),
    _by("a full disk, an exhausted quota, a limit on file sizes", "P2", "any file of a run", "the writer",
        "DiskError", "file, bytes to write, bytes free", "at the write", "the old file stays unchanged",
        "tests/test_disk.py::test_it_is_named_with_the_file_and_the_bytes",
        "tests/test_disk.py::test_a_file_that_could_not_be_replaced_is_as_it_was"),
    # P3: bitwise resume
    _by("SIGTERM in a training step, SIGKILL in an update, SIGTERM while sampling", "P3, P15",
        "ranks, engine, torchrun",
        "all ranks", "", "rank, phase, step, --resume", WITHIN, RESUMES,
        "tests/end_to_end/test_run.py::test_kill_9_and_sigterm_change_nothing"),
    _by("the newest checkpoint damaged, other ranks than before", "P3", "a checkpoint on disk", "all ranks", "",
        "the steps that are repeated, the other layout", AT_RESUME, "continues from the previous checkpoint",
        "tests/end_to_end/test_resume.py::test_a_run_goes_on_with_another_layout"),
    # P4: the death of a rank is bounded and named
    _by("a rank killed, stopped, hung in a collective; its torchrun or store gone", "P4", "a rank",
        "the other ranks", "",
        "rank, pid, host, phase and step", "within run.peer_timeout_seconds", "--resume is named",
        "tests/train/test_peers.py::test_a_killed_rank_is_named_with_its_phase",
        "tests/train/test_peers.py::test_a_stopped_rank_is_named_and_ended",
        "tests/train/test_peers.py::test_a_store_that_is_gone_or_stopped_ends_all_ranks",
        "tests/train/test_peers.py::test_a_rank_whose_torchrun_died_ends"),
    _by("a rank that lives and never begins a collective", "P4", "a rank", "rank 0", "",
        "rank, pid, host, phase, step, microbatch and layer; stacks of all ranks", "within run.hang_seconds",
        "--resume is named",
        "tests/train/test_peers.py::test_ranks_that_live_and_do_not_get_on_are_ended_and_the_late_one_is_named"),
    _by("an engine or a rank stopped in a run", "P4, P5", "engine, rank 1", "rank 0", "",
        "the hanging process and its pid", WITHIN,
        "every process ends",
        "tests/end_to_end/test_faults.py::test_it_ends_and_names_the_dead"),
    _by("one pipeline stage fails", "P4", "one stage", "its neighbour", "", "the stage's own error", WITHIN, REFUSED,
        "tests/distributed/test_ends.py::test_a_stage_that_fails_is_heard_and_its_neighbour_does_not_wait"),
    # P5: a sampler that crashes, hangs or answers wrongly
    _by("an engine that is killed while idle or sampling, stopped, too late, or cannot start", "P5", "engine", "rank 0",
        "SamplerGone",
        "pid, signal or silence, log", "at the next call, or when its time to answer ends",
        "no unfinished record can be read",
        "tests/rollout/test_faults.py::test_an_engine_killed_while_idle_is_named",
        "tests/rollout/test_faults.py::test_an_engine_killed_while_sampling_is_named",
        "tests/rollout/test_faults.py::test_a_stopped_engine_is_named_and_ended",
        "tests/rollout/test_faults.py::test_an_engine_that_is_late_is_ended",
        "tests/rollout/test_faults.py::test_an_engine_that_cannot_start_says_why"),
    _by("a server lost while it samples or loads", "P5", "one of several servers", "client", "SamplerGone",
        "address and cause", "at the call",
        "up to rollout.max_lost_servers, the others sample the missing sequences, none twice",
        "tests/rollout/test_fleet.py::test_a_lost_server_ends_the_run_and_the_others_calls",
        "tests/rollout/test_fleet.py::test_within_the_bound_the_others_sample_what_is_lacking_and_nothing_is_doubled"),
    _by("frames that are cut, foreign or of another type", "P5, P12", "between engine and rank 0", "receiver", "",
        "the part that is no message", AT_ONCE, REFUSED,
        "tests/test_messages.py::test_what_is_no_message_is_named"),
    _by("a server lost in the middle of an agent's turn; then the last one", "P5", "one of two servers", "gateway",
        "SamplerGone", "address and cause", "at the call",
        "the other samples the turn again; the last one ends the gateway",
        "tests/gateway/test_standalone.py::test_over_two_servers_of_which_one_dies",
        "tests/gateway/test_turn_sampler.py::test_a_turn_of_a_lost_place_is_sampled_again_elsewhere",
        "tests/end_to_end/test_episodes_servers.py::test_an_asynchronous_run_goes_on_when_a_server_is_killed"),
    # P6: no stale or torn weights
    _by("an update torn, stale, of another set of tensors, of other bytes (disk, shared memory, broadcast)", "P6",
        "between trainer and engine", "engine", "WeightSyncError", "tensor, or version", BEFORE_SAMPLING,
        "nothing is sampled until a whole update arrives",
        "tests/weights/test_intake.py::test_other_bytes_than_the_trainer_meant_are_refused",
        "tests/weights/test_intake.py::test_another_set_of_tensors_is_refused_before_anything_is_touched",
        "tests/weights/test_intake.py::test_stale_updates_are_refused",
        "tests/weights/test_intake.py::test_a_torn_update_is_refused_and_nothing_is_whole_until_a_whole_one",
        "tests/weights/test_shared_disk.py::test_damaged_parts_are_named",
        "tests/weights/test_broadcast.py::test_other_bytes_than_the_trainer_meant_are_refused"),
    _by("a broadcast that breaks off, or differs from its announcement", "P6", "between trainer and servers",
        "both ends",
        "WeightSyncError", "the failed end and the cause", BEFORE_SAMPLING,
        "nothing is sampled until a whole update arrives",
        "tests/weights/test_broadcast.py::test_a_broadcast_that_breaks_off_leaves_nothing_whole",
        "tests/weights/test_broadcast.py::test_a_stream_that_is_not_what_was_announced_is_broken_off",
        "tests/weights/test_broadcast.py::test_a_sender_that_dies_is_named",
        "tests/weights/test_broadcast.py::test_a_wrong_plan_of_senders_is_refused",
        "tests/weights/test_broadcast.py::test_of_a_broadcast_that_failed_both_ends_tell"),
    _by("one of two workers gets other bytes", "P6", "a server's worker", "server", "WeightSyncError",
        "the workers differ", BEFORE_SAMPLING, "nothing is sampled until a whole update arrives",
        "tests/rollout/test_parallel_server.py::test_a_worker_that_got_other_bytes_is_found_out"),
    _by("vLLM without the patch for reloads", "P6", "engine", "engine, at its start", "PatchError",
        "the patch and the command that applies it", AT_START, REFUSED,
        "tests/vllm/test_patches.py::test_unpatched_is_one_message_with_the_command",
        "tests/rollout/test_faults.py::test_without_the_reload_patch_the_same_weights_are_silently_other_ones"),
    _by("every wrong export that was thought of; a checkpoint that differs from what the run trains from", "P6",
        "trainer: the export, and the start of a run", "all ranks", "WeightSyncError", "layer, expert, tensor",
        BEFORE_SAMPLING, REFUSED,
        "tests/megatron/test_wrong_exports.py::test_every_wrong_export_is_named_before_the_update_is_final",
        "tests/megatron/test_wrong_exports.py::test_what_is_no_longer_the_checkpoint_is_named_at_the_start"),
    _by("a second run takes a server while the first trains or samples", "P6, P5", "a server's control routes",
        "server and client of the first run", "SamplerGone", "address, and that another run took it", BEFORE_SAMPLING,
        "the first run ends, the second continues",
        "tests/rollout/test_server.py::test_a_second_run_takes_the_server_and_the_first_is_told"),
    # P7: replay is exact or refused
    _by("a wrong k, ids out of range or repeated, missing or extra rows, other tokens, other weights", "P7", "a record",
        "validator", "RouteValidationError", "request, token, layer", BEFORE_UPDATE, REFUSED,
        "tests/trace/test_validator.py::test_fault_is_refused"),
    _by("buffers that no router filled; layers with equal rows", "P7", "a record", "validator", "RouteValidationError",
        "request and layer", BEFORE_UPDATE, REFUSED,
        "tests/trace/test_validator.py::test_constant_buffers_are_refused",
        "tests/trace/test_variety.py::test_a_layer_with_the_rows_of_another_is_refused"),
    _by("a step of the engine dropped, repeated or with another offset; a KV block given away", "P7",
        "engine: recorder",
        "recorder", "EngineError", "request, position, slot", "in the engine's step", REFUSED,
        "tests/vllm/test_recorder.py::test_a_dropped_step_is_an_error",
        "tests/vllm/test_recorder.py::test_a_duplicated_step_is_an_error",
        "tests/vllm/test_recorder.py::test_a_wrong_offset_is_an_error",
        "tests/vllm/test_recorder.py::test_a_reused_block_is_refused_for_its_request_alone"),
    _by("nine faults of routers, keys and layers, with plans, TP, PP, EP, CP and recomputation", "P7, P11",
        "trainer: routers and layers", "replay pass", "ReplayError", "microbatch, layer, sequences",
        BEFORE_UPDATE, REFUSED,
        "tests/distributed/test_proof.py::test_a_planted_fault_is_refused_and_named_under_plans",
        "tests/distributed/test_context.py::test_a_rank_that_takes_the_routes_of_another_ranks_rows_is_refused"),
    _by("rows of another layer, position or sequence; a wrong piece of a long sequence", "P7", "a record",
        _ALIGNMENT, "ReplayError", "layer or sequence, and the rows it matches instead", BEFORE_UPDATE, REFUSED,
        "tests/replay/test_alignment.py::test_a_fault_is_refused_by_the_claim_that_is_about_it",
        "tests/replay/test_alignment.py::test_stuck_rows_and_other_pieces_are_named_with_their_sequence"),
    _by("one, two or three ids wrong in every row; an expert in every row; wrong rows of a layer; experts exchanged",
        "P7", "a record", _ALIGNMENT, "ReplayError", "layer, and what is wrong", BEFORE_UPDATE, REFUSED,
        "tests/replay/test_alignment.py::test_a_fault_is_refused_by_the_claim_that_is_about_it"),
    _by("any expert, row, layer, token or request exchanged between engine and dispatcher", "P7",
        "recorder, sink, store, reader, tables",
        _CHECKSUM, "ReplayError", "the sequences", BEFORE_UPDATE, REFUSED,
        "tests/trace/test_source_sum.py::test_any_change_on_the_way_changes_it"),
    # P16: every sequence once, as it was sampled and judged
    _by("a microbatch whose loss is computed twice or not at all; a sequence on two ranks", "P16", "a share",
        _ACCOUNT, "ReplayError", "the sequences, and how often each was learned from", BEFORE_UPDATE, REFUSED,
        "tests/train/test_account.py::test_a_microbatch_whose_loss_is_not_computed_once_is_named",
        "tests/train/test_account.py::test_a_sequence_that_two_ranks_hold_is_named"),
    _by("a token, log-probability, place or advantage that the loss gets otherwise; a loss mask one row late",
        "P16", "a microbatch", _ACCOUNT, "ReplayError", "the sequences", BEFORE_UPDATE, REFUSED,
        "tests/train/test_account.py::test_what_the_loss_got_otherwise_than_it_was_sampled_is_named"),
    _by("a temperature that the sampler does not apply", "P16", "the sampler", _AT_TWO, "ReplayError",
        "the side, and the temperature that it has", BEFORE_FIRST_UPDATE, REFUSED,
        "tests/train/test_first_update.py::test_a_sampler_that_drew_at_another_temperature_is_named"),
    _by("Adam's moments of one rank zeroed behind the loading of a checkpoint", "P3", "one rank's optimizer",
        "all ranks, by sums that the checkpoint holds", "CheckpointError", "the moment and the rank", AT_RESUME,
        REFUSED,
        "tests/distributed/test_state.py::test_moments_that_one_rank_loses_behind_the_checkpoint_are_named"),
    _by("a router's gradient zeroed on one rank, before the sum over ranks or behind it", "P16", "one rank's gradients",
        "all ranks, by the sum and its parts", "ReplayError", "the layer, and the share of the rank", BEFORE_UPDATE,
        REFUSED,
        "tests/distributed/test_state.py::test_a_routers_gradient_that_one_rank_loses_is_named"),
    # P8: a failed verifier gives no reward
    _by("a verifier that raises, hangs, dies, forks, floods, or gives NaN, text, or a sum that is too large", "P8",
        "verifier", "rank 0", "RewardError", "function, completion, failure",
        "within task.verifier_timeout_seconds",
        "this completion has no reward, others keep theirs; too many failures end the run",
        "tests/tasks/test_verifiers.py::test_a_fault_fails_its_item_and_no_other",
        "tests/tasks/test_verifiers.py::test_a_fault_that_a_worker_survives_fails_its_item_and_no_other",
        "tests/tasks/test_verifiers.py::test_hangs_do_not_starve_healthy_items",
        "tests/tasks/test_verifiers.py::test_a_weighted_sum_that_is_too_large_is_no_reward",
        "tests/tasks/test_verifiers.py::test_failed_fraction"),
    # P9: all ranks skip an update that is not finite
    _by("NaN or infinity in a loss or gradient of one rank", "P9", "one rank", "all ranks", "NonFiniteError",
        "the value, the rank, the update", "in that update",
        "nothing changes on any rank; too many in a row end the run",
        "tests/distributed/test_state.py::test_what_one_rank_finds_not_finite_changes_nothing_on_any",
        "tests/distributed/test_state.py::test_so_many_skipped_updates_in_a_row_end_the_run_on_all_ranks"),
    _by("NaN or infinity in any input of any loss, correction, advantage or metric", "P9", "trainer: the objective",
        "guards, or the metric, which is NaN", "NonFiniteError", "the value that is not finite", "in that update",
        "the value is shown; nothing moves",
        "tests/objectives/test_not_finite.py::test_no_loss_hides_it",
        "tests/objectives/test_not_finite.py::test_no_correction_hides_it",
        "tests/objectives/test_not_finite.py::test_no_advantage_hides_it",
        "tests/objectives/test_not_finite.py::test_no_second_moment_hides_it",
        "tests/objectives/test_not_finite.py::test_no_centering_hides_it",
        "tests/objectives/test_not_finite.py::test_no_extreme_fraction_and_no_interval_hides_it",
        "tests/train/test_not_finite.py::test_each_is_shown_where_it_is_nothing_moves_and_the_run_ends"),
    # P10: a wrong config starts nothing
    _by("unknown, misspelt, contradictory or impossible keys; mangled files", "P10", "the config", "the command",
        "ConfigError", "key, line, suggestion", AT_START, REFUSED,
        "tests/config/test_load.py::test_unknown_key_names_line_and_suggestion",
        "tests/config/test_load.py::test_a_mangled_file_loads_or_is_refused_with_reasons",
        "tests/config/test_check.py::test_each_problem_is_one_message",
        "tests/commands/test_train.py::test_one_message_and_nothing_started"),
    # P11: the loss does not depend on the layout
    _by("a mean of means, or parts of sequences counted twice", "P11", "trainer", "the tests", "",
        "the gradients differ", "in the tests", "n/a",
        "tests/distributed/test_objectives.py::test_a_mean_of_each_microbatch_is_another_gradient",
        "tests/distributed/test_objectives.py::test_the_gradient_does_not_depend_on_the_cut"),
    # P12: hostile input is bounded
    _by("headers and frames with false sizes, zip bombs", "P12", "a shard", "reader", "TraceError", "shard",
        "within bounded time and memory", REFUSED,
        "tests/trace/test_damage.py::test_hostile_frames_are_refused_in_bounded_time_and_memory",
        "tests/trace/test_damage.py::test_hostile_headers_are_refused_in_bounded_time_and_memory",
        "tests/trace/test_codec.py::test_a_zip_bomb_costs_no_memory"),
    _by("control calls that are malformed, too large or of the wrong kind", "P12", "a server's routes", "server", "",
        "status and reason", AT_ONCE, "the server continues",
        "tests/rollout/test_server.py::test_a_wrong_control_call_is_refused",
        "tests/rollout/test_server.py::test_a_wrong_control_call_breaks_nothing"),
    _by("token ids that the model does not have, bodies of any kind, bodies that never arrive", "P12",
        "a server's routes", "gate", "", "field and value", AT_ONCE, "the server continues for all clients",
        "tests/vllm/test_gate.py::test_every_field_of_every_route_may_hold_anything",
        "tests/vllm/test_gate.py::test_a_token_that_the_model_does_not_have_is_named",
        "tests/vllm/test_gate.py::test_a_body_that_does_not_come_is_refused_in_time",
        "tests/rollout/test_server.py::test_the_worst_that_can_be_asked_leaves_a_server_that_samples"),
    _by("bodies of any kind from an agent, too long ones, prompts beyond the model or the session's limits", "P12",
        "the gateway's routes", "gateway", "", "field and value, in the client's dialect", AT_ONCE,
        "the gateway continues",
        "tests/gateway/test_bodies.py::test_every_value_of_every_field_may_be_anything",
        "tests/gateway/test_web.py::test_bodies_have_limits",
        "tests/gateway/test_web.py::test_a_session_ends_at_its_limits",
        "tests/gateway/test_openai.py::test_what_is_not_served_is_refused_by_name"),
    # P13: control is authenticated and local
    _by("calls without the token; listeners reachable from outside", "P13", "a server's routes", "server", "", "401",
        AT_ONCE,
        "the server continues",
        "tests/rollout/test_server.py::test_every_route_wants_the_token",
        "tests/rollout/test_server.py::test_listeners_are_on_loopback",
        "tests/rollout/test_server.py::test_the_token_is_told_to_nobody"),
    _by("calls without a session's key, with another session's or with half of it", "P13", "the gateway's routes",
        "gateway", "", "401", AT_ONCE, "the gateway continues; no turn is added",
        "tests/gateway/test_web.py::test_no_route_without_its_key",
        "tests/gateway/test_sessions.py::test_a_session_answers_to_its_own_key_alone"),
    # P14: nothing unsafe is unpickled
    _by("calls of pickle, eval, torch.load and the like", "P14", "the source", "the tests", "", "file and line",
        "in the tests",
        "n/a",
        "tests/test_import_rules.py::test_planted_unsafe_calls_are_found"),
    _by("a pickle that calls something, in a checkpoint", "P14", "Megatron's metadata of a checkpoint", "all ranks",
        "CheckpointError", "the name that the pickle asks for", AT_RESUME, REFUSED,
        "tests/megatron/test_unpickling.py::test_a_pickle_that_calls_something_is_refused_and_calls_nothing"),
    # P15: told to stop, and time
    _by("SIGTERM that comes twice, leaves too little time to save, or reaches one rank only", "P15", "ranks",
        "all ranks",
        "Stopped", "the saved step, --resume", "within checkpoint.grace_seconds", RESUMES,
        "tests/train/test_peers.py::test_what_does_not_fit_into_the_grace_is_not_begun",
        "tests/train/test_peers.py::test_a_second_request_ends_it",
        "tests/train/test_peers.py::test_one_request_may_come_twice"),
    _by("clocks that jump", "P15", "verifiers", "nobody", "", "nothing", "n/a", "the run continues",
        "tests/tasks/test_verifiers.py::test_wall_clock_jumps_do_not_matter"),
)  # fmt: skip

FAULTS = (*ROUTES, *BATCH, *LAYOUTS, *WEIGHTS, *CHAIN, *FLIGHT, *FOLDER, *TESTED)


def of(scene: Scene) -> list[Fault]:
    """Return the faults of one scene, in the order of the list."""
    return [fault for fault in FAULTS if fault.scene == scene]
