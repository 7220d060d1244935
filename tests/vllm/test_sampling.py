"""Tests which requests vLLM accepts, and how its answers become completions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import EngineError, RequestRefused
from moe_rl.types import GenerateRequest, RoutePart, RouteRef, VersionSpan, sampled_by
from moe_rl.vllm.recording import RecordingRequest
from moe_rl.vllm.sampling import Growing, ReportedSpan, check, forwarded, parameters
from tests.support.refusals import refused

LONGEST, VOCABULARY = 16, 100
ONE = (ReportedSpan("3", 0, 2),)
SEVERAL = [ReportedSpan("3", 0, 1), ReportedSpan("4", 1, 2)]


def request(key: str = "a", prompt=(5, 6, 7), *, max_tokens: int = 4, **more) -> GenerateRequest:
    return GenerateRequest(key, tuple(prompt), 0, max_tokens, 1.0, (1,), **more)


def grown(tokens: int, *, finish: str = "stop", versions=ONE) -> Growing:
    sample = Growing()
    for at in range(tokens):
        sample.add([10 + at], [-0.5 * at], finish if at == tokens - 1 else None, versions)
    return sample


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        ([request(prompt=())], "an empty prompt"),
        ([request(max_tokens=0)], "max_tokens 0, expected at least 1"),
        ([request(max_tokens=LONGEST - 2)], "17 tokens, more than max_model_len 16"),
        ([request(prompt=(3, VOCABULARY))], "token ids 3 to 100, expected 0 to 99. Use the tokenizer of the model"),
        ([request(prompt=(-1, 3))], "token ids -1 to 3, expected 0 to 99"),
        ([request(), request()], "a key used twice"),
    ],
)
def test_what_vllm_would_cut_short_or_die_of_is_refused(requests, message):
    with pytest.raises(EngineError, match=f"request a.*{message}"):
        check(requests, max_model_len=LONGEST, vocabulary=VOCABULARY, reads_text=False, keeps_support=False)
    check(
        [request(max_tokens=LONGEST - 3), request("b", (0, VOCABULARY - 1))],
        max_model_len=LONGEST,
        vocabulary=100,
        reads_text=False,
        keeps_support=False,
    )


def test_a_completion_is_of_all_that_came():
    ref = RouteRef("a", 4, (RoutePart("s", "d"),))
    completion = grown(2).completion(request(), {"a": ref})
    assert (completion.token_ids, completion.finish_reason, completion.versions) == ((10, 11), "stop", sampled_by(3, 2))
    assert completion.logprobs.dtype == np.float32 and completion.logprobs.tolist() == [0.0, -0.5]
    assert completion.routes is ref and completion.prompt_token_ids == (5, 6, 7)
    assert grown(2).completion(request(), {}).routes is None


def test_the_weights_that_sampled_each_token_are_told():
    completion = grown(3, versions=[ReportedSpan("3", 0, 1), ReportedSpan("5", 1, 3)]).completion(request(), {})
    assert completion.versions == (VersionSpan(1, 3), VersionSpan(2, 5))
    assert (completion.oldest_version, completion.newest_version) == (3, 5)


@pytest.mark.parametrize(
    "versions",
    [
        None,
        (),
        [ReportedSpan("3", 0, 1)],
        [ReportedSpan("3", 1, 2)],
        [ReportedSpan("3", 0, 1), ReportedSpan("2", 1, 2)],
    ],
)
def test_tokens_of_unknown_weights_are_no_completion(versions):
    with refused(EngineError, request="a", fault="versions"):
        grown(2, versions=versions).completion(request(), {})


@pytest.mark.parametrize(
    ("finish", "stops", "ended_by"),
    [
        ("stop", (1, 11), 11),  # not the first of them
        ("stop", (10, 11), 11),  # the other one lies inside
        ("stop", (1,), None),  # vLLM ended it for another reason
        ("length", (11,), None),
        ("abort", (11,), None),
    ],
)
def test_the_stop_token_that_ended_a_completion_is_told(finish, stops, ended_by):
    completion = grown(2, finish=finish).completion(replace(request(), stop_token_ids=stops), {})
    assert (completion.stop_token_id, completion.token_ids) == (ended_by, (10, 11))
    assert completion.text_token_ids == ((10, 11) if ended_by is None else (10,))


def test_the_stop_string_that_ended_a_completion_is_told():
    """Its last token may be a stop token too: vLLM then says which of the two it was."""
    sample = Growing()
    sample.add([10, 11], [-0.5, -0.5], "stop", [ReportedSpan("4", 0, 2)], "##")
    completion = sample.completion(replace(request(), stop=("##",), stop_token_ids=(11,)), {})
    assert (completion.stop_string, completion.stop_token_id) == ("##", None)
    assert completion.text_token_ids == completion.token_ids == (10, 11)


def test_text_is_read_only_for_stop_strings():
    with_stop, without = parameters(replace(request(), stop=("##",)), None), parameters(request(), None)
    assert (with_stop["stop"], with_stop["detokenize"]) == (["##"], True)
    assert (without["stop"], without["detokenize"]) == ([], False)
    assert with_stop["skip_special_tokens"] is False
    limits = {"max_model_len": 99, "vocabulary": 99}
    check([replace(request(), stop=("##",))], **limits, reads_text=True, keeps_support=False)
    with refused(EngineError, request="a", got="stop strings"):
        check([replace(request(), stop=("##",))], **limits, reads_text=False, keeps_support=False)


def test_a_request_that_vllm_ends_with_an_error_has_no_completion():
    with refused(EngineError, request="a") as caught:
        grown(2, finish="error").completion(request(), {})
    assert not isinstance(caught.value, RequestRefused)
    with refused(RequestRefused, request="a"):  # no other sampler could follow this grammar
        grown(2, finish="error").completion(replace(request(), grammar="{}"), {})


def test_a_grammar_needs_masks_and_text():
    limits = {"max_model_len": 99, "vocabulary": 99}
    asked = replace(request(), grammar="{}")
    check([asked], **limits, reads_text=True, keeps_support=True)
    with refused(EngineError, "rollout.keep_sampling_mask=true", request="a", fault="grammar"):
        check([asked], **limits, reads_text=True, keeps_support=False)
    with refused(EngineError, request="a", fault="grammar", got=("no tokenizer",)):
        check([asked], **limits, reads_text=False, keeps_support=True)
    with refused(EngineError, request="a", fault="grammar", got=("no stop tokens",)):
        check([replace(asked, stop_token_ids=())], **limits, reads_text=True, keeps_support=True)
    with refused(EngineError, request="a", fault="grammar", expected="at most 65536"):
        check([replace(asked, grammar="x" * 65537)], **limits, reads_text=True, keeps_support=True)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -9999.0, 1e39])
@pytest.mark.parametrize("finish", ["stop", "abort"])
def test_a_logprob_that_no_sampled_token_has_is_refused(bad, finish):
    """-9999 stands for -inf in vLLM's JSON; 1e39 does not fit in float32."""
    sample = grown(2, finish=finish)
    sample.logprobs[1] = float(bad)
    with refused(EngineError, request="a", token=1, got=f"{np.float32(bad):g}"):
        sample.completion(request(), {})


def test_what_was_forwarded_is_published():
    requests = [request(key) for key in "abcd"]
    asks = [RecordingRequest(one.key, "shard") for one in requests[:3]] + [None]
    samples = [grown(2), grown(1, finish="abort"), Growing(finish_reason="abort"), grown(2)]
    assert forwarded(requests, asks, samples) == ({"a": [5, 6, 7, 10], "b": [5, 6, 7], "c": []}, ["b"])


def test_what_is_recorded_travels_with_the_request():
    assert parameters(request(), None)["extra_args"] is None
    asked = parameters(request(), RecordingRequest("a", "shard", start=2))
    assert asked["extra_args"] == {"moe_rl_key": "a", "moe_rl_sink": "shard", "moe_rl_start": 2}
    assert asked["ignore_eos"] and asked["stop_token_ids"] == [1]


def test_vllm_is_asked_for_what_the_request_says():
    asked = GenerateRequest("a", (5,), 77, 9, 0.7, (1, 2), top_k=4, top_p=0.9, min_p=0.1)
    wanted = {"seed": 77, "max_tokens": 9, "temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.1}
    assert parameters(asked, None).items() >= {**wanted, "logprobs": 0}.items()
    shared = replace(asked, seed=None)
    check([shared], max_model_len=32, vocabulary=64, reads_text=False, keeps_support=False)
    assert parameters(shared, None)["seed"] is None
