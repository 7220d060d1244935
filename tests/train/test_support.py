"""Recorded sampling supports are read back as written; impossible supports are refused, naming request and token."""

from dataclasses import replace

import numpy as np
import pytest

from moe_rl.errors import SupportError
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.train.sampling_support import read_head, read_support
from moe_rl.types import InsertedTokens, Provenance, Sequence, Span, sampled_by
from tests.support.refusals import refused

VOCABULARY = 50
TOKENS = (7, 40, 9)
COUNTS, IDS = [3, 0, 2], [2, 7, 30, 9, 49]


@pytest.fixture
def read(tmp_path):
    """Read the support of a completion of TOKENS with these arrays."""

    def run(surplus=0, **aux):
        root = tmp_path / f"trace{len(list(tmp_path.iterdir()))}"
        store = TraceStore(root)
        spec = TraceSpec.from_layers("tiny", 4, 1, (0,), 1)
        with ShardWriter(root, "step", spec) as writer:
            rows = 4 + surplus
            spans, routes = [Span(rows, 0, Provenance.DECODE)], np.zeros((rows, 1, 1), np.uint8)
            ref = writer.add("s1/p2/c3", routes, np.array([5, 6, *TOKENS, 1][:rows], np.int32), spans, aux=aux)
        ref = replace(ref, rows=4)
        sequence = Sequence("s1/p2/c3", (5, 6), TOKENS, np.zeros(3, np.float32), 1.0, sampled_by(0, 3), ref)
        return read_support(store, sequence, VOCABULARY)

    return run


def recorded(counts, ids):
    """The arrays of tokens that have a set each."""
    return {
        "support_sets": np.arange(len(counts), dtype=np.uint32),
        "support_counts": np.array(counts, np.int32),
        "support_ids": np.array(ids, np.int32),
    }


def of_tokens(support):
    """Return the number of ids of each token's set, and all their ids."""
    ids = np.split(support.ids, np.cumsum(np.abs(support.counts)))
    return support.counts[support.sets].tolist(), [i for number in support.sets for i in ids[number].tolist()]


def test_a_support_comes_back_as_it_was_recorded(read):
    support = read(**recorded(COUNTS, IDS))
    assert of_tokens(support) == (COUNTS, IDS)


def test_tokens_share_sets_and_a_set_may_list_what_could_not_be_drawn(read):
    sets = {"support_sets": np.array([1, 0, 1], np.uint32)}
    assert of_tokens(read(**recorded([1, -2], [40, 8, 30]) | sets)) == ([-2, 1, -2], [8, 30, 40, 8, 30])
    with refused(SupportError, fault="absent", token=2, got=("9", "2 ids that could not")):
        read(**recorded([1, -2], [40, 9, 30]) | sets)
    with refused(SupportError, fault="counts", got=("1 sets",)):
        read(**recorded([-2], [8, 30]) | sets)


def test_tokens_that_were_drawn_behind_a_stop_string_have_no_support(read):
    support = read(surplus=2, **recorded([*COUNTS, 1, 2], [*IDS, 8, 3, 4]))
    assert of_tokens(support) == (COUNTS, IDS)
    for counts, ids in ((COUNTS, IDS), ([*COUNTS, 1], [*IDS, 8])):
        with refused(SupportError, fault="tokens", got=(str(len(counts)),), expected=("5",)):
            read(surplus=2, **recorded(counts, ids))


def test_the_pieces_of_a_completion_have_the_supports_of_their_own_tokens(tmp_path):
    spec = TraceSpec.from_layers("tiny", 4, 1, (0,), 1)

    def add(writer, key, tokens, parent, counts, ids):
        routes, spans = np.zeros((len(tokens), 1, 1), np.uint8), [Span(len(tokens), 0, Provenance.DECODE)]
        return writer.add(key, routes, np.array(tokens, np.int32), spans, parent=parent, aux=recorded(counts, ids))

    def read(counts, ids):
        root = tmp_path / f"trace{len(list(tmp_path.iterdir()))}"
        with ShardWriter(root, "step", spec) as writer:
            # A turn before the completion, of 1 token; then two pieces, of 2 tokens and 1.
            ref = add(writer, "turn", (5,), None, [1], [6])
            ref = add(writer, "piece", (6, TOKENS[0]), ref, counts, ids)
            ref = add(writer, "rest", TOKENS[1:2], ref, COUNTS[2:], IDS[3:])
        sequence = Sequence("s1/p2/c3", (5, 6), TOKENS, np.zeros(3, np.float32), 1.0, sampled_by(0, 3), ref)
        return read_support(TraceStore(root), sequence, VOCABULARY)

    support = read(COUNTS[:2], IDS[:3])
    assert of_tokens(support) == (COUNTS, IDS)
    with refused(SupportError, fault="tokens", got=("1",), expected=("2",)):
        read(COUNTS[:1], IDS[:3])


def test_completions_that_share_all_rows_of_their_prompt_have_their_own_supports(tmp_path):
    spec = TraceSpec.from_layers("tiny", 4, 1, (0,), 1)

    def add(writer, key, tokens, parent, counts, ids):
        routes, spans = np.zeros((len(tokens), 1, 1), np.uint8), [Span(len(tokens), 0, Provenance.DECODE)]
        return writer.add(key, routes, np.array(tokens, np.int32), spans, parent=parent, aux=recorded(counts, ids))

    def read(counts, ids):
        root = tmp_path / f"trace{len(list(tmp_path.iterdir()))}"
        with ShardWriter(root, "step", spec) as writer:
            first = add(writer, "s1/p2/c0", (5, 6, 8, 8), None, [1, 1, 1], [8, 8, 8])
            ref = add(writer, "s1/p2/c3", TOKENS[:2], replace(first, rows=2), counts, ids)
        sequence = Sequence("s1/p2/c3", (5, 6), TOKENS, np.zeros(3, np.float32), 1.0, sampled_by(0, 3), ref)
        return read_support(TraceStore(root), sequence, VOCABULARY)

    support = read(COUNTS, IDS)
    assert of_tokens(support) == (COUNTS, IDS)
    with refused(SupportError, fault="tokens", got=("4",)):
        read([*COUNTS, 1], [*IDS, 8])


def test_the_turns_of_a_dialogue_have_the_supports_of_what_was_said(tmp_path):
    """One more token was drawn behind the first turn, because its stop string was found late."""
    spec = TraceSpec.from_layers("tiny", 4, 1, (0,), 1)

    def add(writer, key, tokens, parent, counts, ids):
        routes, spans = np.zeros((len(tokens), 1, 1), np.uint8), [Span(len(tokens), 0, Provenance.DECODE)]
        return writer.add(key, routes, np.array(tokens, np.int32), spans, parent=parent, aux=recorded(counts, ids))

    def read(late):
        root = tmp_path / f"trace{len(list(tmp_path.iterdir()))}"
        with ShardWriter(root, "step", spec) as writer:
            ref = replace(add(writer, "turn0", (5, 6, 7), None, [COUNTS[0], *late], [*IDS[:3], *late]), rows=2)
            ref = add(writer, "turn1", (7, 30, 31, 40), ref, COUNTS[1:], IDS[3:])
        sequence = Sequence("s1/p2/c3", (5, 6), TOKENS, np.zeros(3, np.float32), 1.0, sampled_by(0, 3), ref,
                            inserted=(InsertedTokens(1, (30, 31)),))  # fmt: skip
        return read_support(TraceStore(root), sequence, VOCABULARY)

    support = read([1])
    assert of_tokens(support) == (COUNTS, IDS)
    with refused(SupportError, fault="tokens", got=("1",), expected=("2",)):
        read([])


@pytest.mark.parametrize(
    "aux, facts",
    [
        ({}, {"fault": "unreadable"}),
        (recorded(COUNTS[:2], IDS[:3]), {"fault": "tokens", "got": ("2",), "expected": ("3",)}),
        (recorded(COUNTS, IDS[:4]), {"fault": "counts", "got": ("4",), "expected": ("5",)}),
        (recorded(COUNTS, [2, 7, 30, 9, 50]), {"fault": "vocabulary", "token": 2, "got": ("50",)}),
        (recorded(COUNTS, [-1, 7, 30, 9, 49]), {"fault": "vocabulary", "token": 0, "got": ("-1",)}),
        (recorded(COUNTS, [7, 2, 30, 9, 49]), {"fault": "order", "token": 0, "got": ("2", "7")}),
        (recorded(COUNTS, [2, 7, 30, 9, 9]), {"fault": "order", "token": 2, "got": ("9",)}),
        # 9 and 49 are token 2's, 7 is token 0's: each token's own ids count
        (recorded(COUNTS, [2, 9, 30, 9, 49]), {"fault": "absent", "token": 0, "got": ("7",)}),
        (recorded(COUNTS, [2, 7, 30, 7, 49]), {"fault": "absent", "token": 2, "got": ("9",)}),
    ],
)
def test_a_wrong_support_is_refused(read, aux, facts):
    with refused(SupportError, request="s1/p2/c3", **facts):
        read(**aux)


def test_a_completion_that_was_not_recorded_is_refused(tmp_path):
    sequence = Sequence("s1/p2/c3", (5, 6), TOKENS, np.zeros(3, np.float32), 1.0, sampled_by(0, 3), None)
    with refused(SupportError, fault="missing", request="s1/p2/c3"):
        read_support(TraceStore(tmp_path), sequence, VOCABULARY)


HEAD_IDS = [[7, 2], [40, 7], [1, 9]]
HEAD_LOGPROBS = [[-0.5, -1.5], [-0.1, -3.0], [-1.0, -1.2]]
SAMPLED = np.array([-0.5, -0.1, -1.2], np.float32)


@pytest.fixture
def head(tmp_path):
    """Read the head of a completion of TOKENS with these ids and logprobs."""

    def run(ids=HEAD_IDS, logprobs=HEAD_LOGPROBS, size=2, vocabulary=VOCABULARY):
        root = tmp_path / f"trace{len(list(tmp_path.iterdir()))}"
        aux = {"head_ids": np.array(ids, np.int32), "head_logprobs": np.array(logprobs, np.float32)}
        with ShardWriter(root, "step", TraceSpec.from_layers("tiny", 4, 1, (0,), 1)) as writer:
            tokens = np.array([5, 6, *TOKENS[:-1]], np.int32)
            spans = [Span(4, 0, Provenance.DECODE)]
            ref = writer.add("s1/p2/c3", np.zeros((4, 1, 1), np.uint8), tokens, spans, aux=aux)
        sequence = Sequence("s1/p2/c3", (5, 6), TOKENS, SAMPLED, 1.0, sampled_by(0, 3), ref)
        return read_head(TraceStore(root), sequence, vocabulary, size)

    return run


def test_a_head_comes_back_as_it_was_recorded(head):
    found = head()
    assert found.ids.tolist() == HEAD_IDS
    np.testing.assert_array_equal(found.logprobs, np.array(HEAD_LOGPROBS, np.float32))
    few = head(logprobs=[*HEAD_LOGPROBS[:2], [-np.inf, -1.2]])  # one token could be drawn
    assert few.logprobs[2, 0] == -np.inf


@pytest.mark.parametrize(
    "given, facts",
    [
        ({"ids": HEAD_IDS[:2]}, {"fault": "tokens", "got": ("2",), "expected": ("3",)}),
        ({"size": 3}, {"fault": "size", "got": ("(3, 2)",), "expected": ("(3, 3)",)}),
        ({"logprobs": [[-0.5], [-0.1], [-1.2]]}, {"fault": "size", "got": ("(3, 1)",)}),
        ({"ids": [[7, 2], [40, 50], [1, 9]]}, {"fault": "vocabulary", "token": 1}),
        ({"ids": [[7, 2], [40, 7], [-1, 9]]}, {"fault": "vocabulary", "token": 2}),
        ({"ids": [[7, 7], [40, 7], [1, 9]]}, {"fault": "twice", "token": 0}),
        ({"logprobs": [[-0.5, -1.5], [-0.1, -0.1], [-1.0, -1.2]]}, {"fault": "probability", "token": 1}),
        ({"logprobs": [[-0.5, np.nan], [-0.1, -3.0], [-1.0, -1.2]]}, {"fault": "probability", "token": 0}),
        # the heads of two tokens exchanged
        ({"logprobs": [[-0.5, -1.5], [-0.1, -3.0], [-1.2, -1.0]]}, {"fault": "sampled", "token": 2}),
    ],
)
def test_a_wrong_head_is_refused(head, given, facts):
    with refused(SupportError, request="s1/p2/c3", **facts):
        head(**given)


def test_a_head_has_no_more_tokens_than_the_vocabulary(head):
    ids = [[1, 0], [0, 1], [0, 1]]
    assert head(ids=ids, size=9, vocabulary=2).ids.tolist() == ids
