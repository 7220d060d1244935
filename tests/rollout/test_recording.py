"""Tests that recorded routes equal those of `transformers` in everything vLLM may do with a request.

Each case has a witness that vLLM really did it.

Legend for shapes: T tokens, L MoE layers, K top-k experts per token, E experts.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch

from moe_rl.trace import RouteRecord, TraceStore, signed, validate
from moe_rl.trace.spans import versions_of_rows
from moe_rl.types import Provenance, RouteRef, VersionSpan
from tests.rollout.conftest import TOP_K, VOCAB
from tests.rollout.in_flight import trainer_reads
from tests.support.independent import Independent
from tests.weights.sending import by_disk

# An engine takes 20 s to start and to be compiled for; on a busy machine a multiple.
pytestmark = pytest.mark.timeout(900)

STOPS = list(range(0, VOCAB, 40))
SCENARIO = Path(__file__).with_name("scenario.py")


@dataclass
class Outcome:
    """Holds the result of a scenario, and its store."""

    result: dict
    store: TraceStore

    def completions(self, act: int = 0) -> list[dict]:
        return self.result["acts"][act]["completions"]

    @property
    def stats(self) -> dict[str, int]:
        return self.result["stats"][0]

    @staticmethod
    def ref(completion: dict) -> RouteRef:
        return msgspec.convert(completion["ref"], RouteRef)


class Scenarios:
    """Plays scenarios one after the other in scenario.py, which starts with the first one."""

    def __init__(self, folder: Path, environment: dict[str, str]):
        # Set for this process by the tests of the trainer; the sampler here is compiled.
        inherited = {name: value for name, value in os.environ.items() if name != "TORCHDYNAMO_DISABLE"}
        inherited |= {"OMP_NUM_THREADS": "1", "VLLM_CACHE_ROOT": str(folder)}
        self._environment = inherited | environment
        self._process = None

    def __call__(self, folder: Path, spec: dict, timeout: float) -> dict:
        """Play a scenario; all its files are in `folder`."""
        paths = {name: str(folder / name) for name in ("spec", "result", "log")}
        (folder / "spec").write_text(json.dumps(spec))
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, str(SCENARIO)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=self._environment,
            )
        self._process.stdin.write(json.dumps(paths) + "\n")
        self._process.stdin.flush()
        ended, _, _ = select.select([self._process.stdout], [], [], timeout)
        status = self._process.stdout.readline() if ended else f"none in {timeout} s"
        if status != "0\n":
            self.close()
            raise AssertionError(f"exit status {status}: {(folder / 'log').read_text()[-4000:]}")
        return json.loads((folder / "result").read_text())

    def close(self) -> None:
        if self._process is not None:
            for process in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    running = Scenarios(tmp_path_factory.mktemp("cache"), {})
    yield running
    running.close()


@pytest.fixture
def play(tmp_path, checkpoint, scenarios):
    """Return a function that runs a scenario in a process of its own."""
    own = []

    def run(acts, *, engine=None, recording=None, timeout=600, environment=None, **spec) -> Outcome:
        given = {"trace_root": str(tmp_path / "trace"), "model_fingerprint": "tiny"}
        spec |= {
            "acts": acts,
            "engine": {"model": str(checkpoint)} | (engine or {}),
            "recording": given | (recording or {}),
        }
        if environment is not None:  # which counts when vLLM is imported
            own.append(Scenarios(tmp_path / "cache", environment))
        return Outcome((own or [scenarios])[-1](tmp_path, spec, timeout), TraceStore(tmp_path / "trace"))

    yield run
    for one in own:
        one.close()


def summed(ref: RouteRef, record: RouteRecord) -> bool:
    """Whether the record's checksum equals that of the reference, taken at the engine's buffer."""
    versions = versions_of_rows(record.spans)
    return signed(ref, record.routes, record.layers, record.token_ids, versions=versions).source_sum == ref.source_sum


def agree(outcome: Outcome, model: Independent, *, act: int = 0, version: int = 0) -> int:
    """Check that every completion of an act is valid and sampled and routed as in `transformers`. Returns the number of
    choices."""
    choices = 0
    for completion in outcome.completions(act):
        tokens = [*completion["prompt"], *completion["token_ids"]]
        ref = outcome.ref(completion)
        record = outcome.store.read(ref)
        validate(record, token_ids=tokens[:-1], spec=record.spec, weight_version=version, max_staleness=9, ref=ref)
        assert summed(ref, record), "the store has other routes than left the engine's buffer"
        computed = model(tokens, temperature=completion["temperature"])
        computed.check(completion["key"], record.routes, np.array(completion["logprobs"]), atol=2e-5)
        choices += record.routes[..., 0].size
    return choices


def requests(groups: int, size: int, *, prompt=70, max_tokens=24, seed=1, **more) -> list[dict]:
    """`groups` prompts of different lengths, `size` requests with each."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, prompt + 5 * at).tolist() for at in range(groups)]
    return [
        {"key": f"p{at}/c{sample}", "prompt": tokens, "seed": 100 * at + sample, "max_tokens": max_tokens} | more
        for at, tokens in enumerate(prompts)
        for sample in range(size)
    ]


def provenance(outcome: Outcome, completion: dict) -> list[tuple[int, int, str]]:
    """Return (rows, weight version, provenance) of a completion's record, span by span."""
    record = outcome.store.read(outcome.ref(completion))
    return [(span.rows, span.weight_version, Provenance(span.provenance).name) for span in record.spans]


@pytest.mark.seeds(3)
def test_what_requests_do(play, reference):
    """One engine: samples of vLLM's own, groups that share prefixes, early stops, aborts, rows from a position on."""
    late = [one | {"extra": {"moe_rl_start": 50}} for one in requests(1, 1, seed=3)]
    outcome = play(
        [
            {"sample": requests(4, 1, n=4), "sink": "n"},
            {"sample": requests(4, 8, seed=2), "sink": "groups"},
            {"sample": requests(6, 4, max_tokens=60, stop_token_ids=STOPS, seed=4), "sink": "stop"},
            {"sample": requests(4, 2, max_tokens=60, seed=5), "sink": "abort", "abort_after": 20},
            {"sample": late, "sink": "late"},
        ]
    )
    for act in range(4):
        agree(outcome, reference, act=act)

    assert [one["key"] for one in outcome.completions(0)[:5]] == ["p0/c0/0", "p0/c0/1", "p0/c0/2", "p0/c0/3", "p1/c0/0"]
    groups = outcome.completions(1)
    rows = sum(one["rows"] for act in range(5) for one in outcome.completions(act))
    assert outcome.stats["forwarded"] < rows - 4 * 7 * 64, "no prefix was shared"
    assert sum(outcome.store.info(outcome.ref(one)).parent is not None for one in groups) == 4 * 7
    assert len({len(one["token_ids"]) for one in outcome.completions(2)}) > 3, "nothing stopped early"
    for completion in outcome.completions(3):
        assert completion["aborted"] and 0 < len(completion["token_ids"]) < 60
        assert outcome.store.info(outcome.ref(completion)).aborted

    (one,) = outcome.completions(4)
    tokens = one["prompt"] + one["token_ids"]
    record = outcome.store.read(outcome.ref(one))
    assert outcome.ref(one).start == 50 and summed(outcome.ref(one), record)
    assert record.token_ids.tolist() == tokens[50:-1]
    reference(tokens).check_routes(one["key"], record.routes, first=50)


@pytest.mark.long
def test_worker_class_without_a_patch(play, reference, tmp_path):
    """The same recorder is attached by `worker_cls`, in a copy of vLLM restored to its released files."""
    from moe_rl.vllm import patches

    outcome = play(
        [{"sample": requests(3, 4), "sink": "s"}, {"sample": requests(1, 2, top_k=8, top_p=0.9), "sink": "cut"}],
        capture="worker",
        recording={"support": True},
        environment=_pristine(tmp_path, patches),
    )
    agree(outcome, reference)
    for completion in outcome.completions(1):
        ref, tokens = outcome.ref(completion), completion["token_ids"]
        sets, counts, ids = (outcome.store.aux(ref, f"support_{name}") for name in ("sets", "counts", "ids"))
        assert len(sets) == len(tokens) and 1 <= counts.min() <= counts.max() <= 8
        supports = np.split(ids, np.cumsum(counts)[:-1])
        assert all(token in supports[number] for token, number in zip(tokens, sets, strict=True))


def _pristine(tmp_path, patches) -> dict[str, str]:
    """Put an unpatched vLLM first on the path: the changed files are copies, all others are links."""
    source = patches.find_vllm()
    target = tmp_path / "site" / "vllm"

    def link(folder: Path) -> None:
        (target / folder.relative_to(source)).mkdir(parents=True)
        for path in folder.iterdir():
            copy = target / path.relative_to(source)
            if path.is_dir() and path in touched:
                link(path)
            elif path in touched:
                copy.write_bytes(path.read_bytes())
            else:
                copy.symlink_to(path)

    files = [source / path for path in patches.inspect(source).files]
    touched = {source, *files, *(parent for file in files for parent in file.parents if source in parent.parents)}
    link(source)
    assert patches.revert(target).summary == "pristine"
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(SCENARIO.parents[2])])}


@pytest.mark.long
def test_chunked_prefill_with_few_tokens_a_step(play, reference):
    outcome = play(
        [{"sample": requests(6, 2, prompt=150), "sink": "s"}],
        engine={"enable_chunked_prefill": True, "max_num_batched_tokens": 48, "max_num_seqs": 8},
    )
    agree(outcome, reference)
    assert outcome.stats["steps"] > 6 * 150 / 48, "prompts were not cut"


@pytest.mark.long
@pytest.mark.parametrize("chunked", [False, True])
def test_preemption_keeps_what_was_sampled_from(play, reference, chunked):
    """The KV cache is too small for the running requests, so some lose their blocks and are computed again."""
    engine = {"num_gpu_blocks_override": 24, "max_num_seqs": 16}
    engine |= {"enable_chunked_prefill": True, "max_num_batched_tokens": 64} if chunked else {}
    outcome = play([{"sample": requests(8, 2, prompt=40, max_tokens=80), "sink": "s"}], engine=engine)
    assert outcome.stats["preemptions"] > 3, "nothing was preempted"
    agree(outcome, reference)


@pytest.mark.long
def test_rows_of_preempted_requests_are_those_that_sampled_over_an_update_too(play, weights, others, tmp_path):
    """New weights come while some requests are preempted. Then the recorder takes the rows of the second pass, then it
    does not hear of preemptions: it refuses both."""
    acts = []
    for version, (tensors, fault) in enumerate(
        ((others, ""), (weights, "overwritten by the second pass"), (others, "preemption missed")), start=1
    ):
        update = by_disk(tmp_path, tensors, version=version, replaces=version - 1)
        asked = requests(7, 2, prompt=40, max_tokens=80, seed=version)
        acts.append({"sample": asked, "sink": f"s{version}", "update": msgspec.to_builtins(update), "update_after": 40})
        acts[-1] |= {"fault": fault} if fault else {}
    outcome = play(acts, engine={"num_gpu_blocks_override": 24, "max_num_seqs": 16})
    for one in outcome.completions():
        versions = [VersionSpan(*span) for span in one["versions"]]
        assert [span.weight_version for span in versions] == [0, 1], "the update came in the middle"
        trainer_reads(outcome.store, one["key"], one["prompt"], one["token_ids"], versions, outcome.ref(one), version=1)
    assert outcome.stats["rewritten"] > 0, "no preempted request was computed again by newer weights"
    overwritten, missed = (act["failed"] for act in outcome.result["acts"][1:])
    assert re.search(r"request p\d/c\d, position \d+, layer \d.* of \d+ sets are wrong", overwritten), overwritten
    assert re.search(r"request p\d/c\d, position \d+, block \d+", missed), missed


@pytest.mark.long
@pytest.mark.parametrize("preempt", [False, True])
def test_asynchronous_scheduling(play, reference, preempt):
    """The next step is scheduled before this step's tokens are known, so a stop takes effect one token late."""
    engine = {"num_gpu_blocks_override": 24, "max_num_seqs": 16} if preempt else {}
    outcome = play(
        [{"sample": requests(8, 2, prompt=40, max_tokens=80, stop_token_ids=STOPS), "sink": "s"}],
        engine=engine,
        asynchronous=True,
    )
    agree(outcome, reference)
    wanted = sum(one["rows"] for one in outcome.completions())
    if preempt:
        assert outcome.stats["preemptions"] > 1, "nothing was preempted"
    else:
        cached = sum((len(one["prompt"]) - 1) // 32 * 32 for one in outcome.completions()[1::2])
        assert outcome.stats["forwarded"] > wanted - cached, "no token was forwarded in vain"


@pytest.mark.long
def test_a_weight_update_between_two_requests(play, reference, others, other_reference, tmp_path):
    """The prefix cache is kept over it. Prompts that are salted with their version find no older rows in it; one that
    is not is refused."""
    update = msgspec.to_builtins(by_disk(tmp_path, others, version=5))

    def asked(salt: str = "") -> list[dict]:
        return requests(2, 1, prompt=100, salt=salt)

    outcome = play(
        [
            {"sample": asked("0") + [asked()[0] | {"key": "plain"}], "sink": "before"},
            {"update": update},
            {"sample": asked("5"), "sink": "after"},
            {"sample": asked("5"), "sink": "again"},
            {"sample": asked()[:1], "sink": "stale", "refused": True},
        ]
    )
    agree(outcome, reference)
    for act, first in ((1, "PREFILL"), (2, "CACHED")):
        for completion in outcome.completions(act):
            how = provenance(outcome, completion)
            assert how[0][1:] == (5, first) and {version for _, version, _ in how} == {5}
            record = outcome.store.read(outcome.ref(completion))
            computed = other_reference(completion["prompt"] + completion["token_ids"])
            computed.check(completion["key"], record.routes, np.array(completion["logprobs"]), atol=2e-5)
    failure = outcome.result["acts"][-1]["failed"]
    assert "request p0/c0, position 0" in failure and "weight version 0, 96 rows" in failure


@pytest.mark.long
def test_compiled(play, reference):
    """The capture is part of the compiled graph; a graph without it must never be reused from the cache."""
    outcome = play([{"sample": requests(4, 4), "sink": "s"}], engine={"enforce_eager": False}, timeout=600)
    agree(outcome, reference)
    recording, off = outcome.result["compile_cache_keys"]
    assert recording != off


@pytest.mark.long
def test_a_short_first_request_in_bfloat16(play):
    """On a CPU with AMX, nothing before the attention asked the kernel for tiles; unpatched vLLM dies of SIGILL."""
    outcome = play([{"sample": requests(1, 1, prompt=3), "sink": "s"}], engine={"dtype": "bfloat16"})
    (one,) = outcome.completions()
    assert one["rows"] == 3 + len(one["token_ids"]) - 1 > 3


@pytest.mark.long
def test_pipeline_stages_record_their_own_layers(play, reference):
    """Tensor and expert parallel workers: test_parallel_server.py."""
    outcome = play(
        [{"sample": requests(4, 4), "sink": "s"}],
        engine={"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"},
        environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        timeout=600,
    )
    agree(outcome, reference)
    assert all(len(one["ref"]["parts"]) == 2 for one in outcome.completions())


@pytest.mark.long
@pytest.mark.parametrize("preempt", [False, True])
def test_speculative_decoding_records_accepted_rows(play, reference, checkpoint, preempt):
    """The draft model is the model itself: right for the greedy requests, mostly wrong for the random ones."""
    draft = {"method": "draft_model", "model": str(checkpoint), "num_speculative_tokens": 3}
    engine = {"speculative_config": draft}
    engine |= {"num_gpu_blocks_override": 14, "max_model_len": 128} if preempt else {}
    greedy = [one | {"key": "greedy" + one["key"]} for one in requests(3, 2, prompt=40, seed=2, temperature=0)]
    drawn = requests(3, 2, prompt=40, temperature=0.7)
    outcome = play([{"sample": drawn + greedy, "sink": "s"}], engine=engine)
    assert (outcome.stats.get("preemptions", 0) > 1) == preempt
    agree(outcome, reference)
    metrics = outcome.result["metrics"]
    drafted, accepted = (metrics[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted"))
    assert 0 < accepted < drafted
    # Those of a request's last step, and of one before a preemption, are missing here, at most 3 of each.
    ours = [outcome.stats[name] for name in ("drafts", "accepted_drafts")]
    missing = 3 * (len(outcome.completions()) + outcome.stats.get("preemptions", 0))
    assert drafted - missing <= ours[0] <= drafted and accepted - missing <= ours[1] <= accepted


@pytest.mark.long
def test_a_model_with_sliding_and_full_attention(play, tmp_path):
    """gpt-oss has two groups of KV blocks; the sliding group frees blocks that leave its window."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=16,
        num_experts_per_tok=TOP_K,
        sliding_window=32,
        max_position_embeddings=1024,
        initializer_range=0.15,
        tie_word_embeddings=False,
    )
    GptOssForCausalLM(config).float().save_pretrained(tmp_path / "gpt-oss")
    (tmp_path / "gpt-oss/tokenizer.json").write_text("{}")
    asked = requests(3, 3, prompt=90, max_tokens=40)
    outcome = play([{"sample": asked, "sink": "s"}], engine={"model": str(tmp_path / "gpt-oss")})
    assert sorted(outcome.result["attention"]) == ["FullAttentionSpec", "SlidingWindowSpec"]
    agree(outcome, Independent(tmp_path / "gpt-oss"))
    rows = sum(one["rows"] for one in outcome.completions())
    assert outcome.stats["forwarded"] < rows - 3 * 2 * 32, "no prefix was shared"


@pytest.mark.seeds(3)
def test_extras(play, reference):
    """Support, log-normaliser, router logits and head are those of `transformers`."""
    asked = requests(3, 2, top_k=20, top_p=0.8, temperature=0.9) + [
        one | {"key": f"free{at}"} for at, one in enumerate(requests(1, 1, seed=7))
    ]
    outcome = play(
        [{"sample": asked, "sink": "s"}],
        recording={"support": True, "log_normalizer": True, "router_logits_fraction": 0.25, "head": 8},
    )
    agree_routes_only = [one | {"logprobs": []} for one in outcome.completions()]
    outcome.result["acts"][0]["completions"] = agree_routes_only
    agree(outcome, reference)
    kept = rows = 0
    for completion in outcome.completions():
        ref = outcome.ref(completion)
        tokens = completion["prompt"] + completion["token_ids"]
        computed, first = reference(tokens), len(completion["prompt"]) - 1
        clear, logprobs = max(computed.clear - first, 0), computed.logits.log_softmax(-1)[first:]
        sets, counts, ids = (outcome.store.aux(ref, f"support_{name}") for name in ("sets", "counts", "ids"))
        mass = outcome.store.aux(ref, "log_normalizer")
        head_ids, head = outcome.store.aux(ref, "head_ids"), outcome.store.aux(ref, "head_logprobs")
        assert len(sets) == len(mass) == len(completion["token_ids"])
        assert head_ids.shape == head.shape == (len(sets), 8) and (head[:, 1:] <= head[:, :-1]).all()
        if completion["key"].startswith("free"):
            assert not counts.any() and not ids.size and np.abs(mass).max() < 1e-5
            expected = np.take_along_axis(logprobs.numpy(), head_ids.astype(np.int64), -1)
            np.testing.assert_allclose(head[:clear], expected[:clear], rtol=0, atol=1e-4)
        else:
            starts = [0, *np.cumsum(counts).tolist()]
            for at, token in enumerate(completion["token_ids"][:clear]):
                scaled = (logprobs[at] / 0.9).log_softmax(-1)
                support = ids[starts[sets[at]] : starts[sets[at] + 1]]
                assert token in support and 1 <= len(support) <= 20 and (np.diff(support) > 0).all()
                inside = scaled[support.tolist()]
                assert float(inside.min()) >= float(scaled.topk(len(support)).values[-1]) - 1e-5
                np.testing.assert_allclose(mass[at], inside.logsumexp(0), atol=1e-4)
                drawable = np.isfinite(head[at])  # the head is of the distribution that the token was drawn from
                assert drawable.sum() == min(8, len(support)) and set(head_ids[at][drawable]) <= set(support)
                kept_of = scaled[head_ids[at][drawable].tolist()] - inside.logsumexp(0)
                np.testing.assert_allclose(head[at][drawable], kept_of, rtol=0, atol=1e-4)
        chosen, stored = outcome.store.aux(ref, "router_logits_rows"), outcome.store.aux(ref, "router_logits")
        compared = chosen < computed.clear
        np.testing.assert_allclose(stored[compared], computed.routers[chosen[compared]], rtol=0, atol=2e-5)
        kept, rows = kept + len(chosen), rows + completion["rows"]
        assert stored.shape[1:] == computed.routers.shape[1:]
    assert 0.1 < kept / rows < 0.3  # a quarter, less the rows that came from the prefix cache


def test_rows_that_are_not_what_the_routers_saw_are_refused(play, reference):
    """Faults between router and slots leave well-formed rows. Each fault is reported, and nothing before or after it
    is."""
    faults = {
        "late": r"request p0/c0, position \d+, layer 0\)",
        "constant": r"layer 1\): got experts \[0, 1, 2, 3\]",
        "swapped": r"layer 1\)",
    }
    acts = [{"sample": requests(2, 2), "sink": "sound"}]
    acts += [{"sample": requests(2, 2, seed=at), "sink": name, "fault": name} for at, name in enumerate(faults, 2)]
    outcome = play([*acts, {"sample": requests(2, 2, seed=9), "sink": "mended", "fault": ""}])
    agree(outcome, reference)
    agree(outcome, reference, act=len(acts))
    for act, said in enumerate(faults.values(), 1):
        failed = outcome.result["acts"][act]["failed"]
        assert re.search("not what the router chose by its logits.*" + said, failed), failed
    rows = sum(one["rows"] for act in (0, len(acts)) for one in outcome.completions(act))
    assert rows / 8 < outcome.stats["witnessed"] < rows
