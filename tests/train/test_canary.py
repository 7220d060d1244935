"""The canary reports wrong routes and logprobs, and reports nothing for correct ones."""

import numpy as np
import pytest

from moe_rl.errors import RouteValidationError, WeightSyncError
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.train.canary import Canary, Native, compare_routes
from moe_rl.types import Provenance, ScoredTokens, Span
from tests.support.refusals import tells

SPEC = TraceSpec("m", 32, 4, "mmmmmmmm")
LENGTHS = (36,) * 7
ROWS = sum(LENGTHS) - len(LENGTHS)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def scores(rng):
    return rng.standard_normal((8, ROWS, 32)).astype(np.float32)


def top(scores):
    """Return the four best experts, int64 [L, S, 4]."""
    return np.argsort(-scores, -1)[..., :4]


@pytest.fixture
def witness(scores):
    return top(scores)


@pytest.fixture
def hear(tmp_path, scores, witness, rng):
    """Compare the canary of a trainer that chose `witness` with a sampler that recorded these routes."""
    runs = [tuple(rng.integers(0, 500, length).tolist()) for length in LENGTHS]
    canary = Canary(runs, TraceStore(tmp_path), SPEC)

    class Sampler:
        def __init__(self, samplers, version=3):
            self.samplers, self.version = samplers, version

        def score(self, runs, *, shard):
            return [self.one(f"{shard}-server{at}", f"server{at}", *given) for at, given in enumerate(self.samplers)]

        def one(self, shard, name, routes, apart):
            logprobs = np.split(np.asarray(apart, np.float32), len(runs))
            if routes is None:
                return ScoredTokens(logprobs, [], name)
            refs, spans = [], [Span(35, self.version, Provenance.PREFILL)]
            with ShardWriter(tmp_path, shard, SPEC) as writer:
                for at, part in enumerate(np.split(routes.transpose(1, 0, 2).astype(np.uint8), len(runs))):
                    refs.append(writer.add(f"scored/{at}", part, np.array(runs[at][:-1], np.int32), spans))
            return ScoredTokens(logprobs, refs, name)

    def call(*samplers, version=3, of=3, exact=0.0, ours=0.0):
        given = [(routes, np.zeros(ROWS) if apart is None else apart) for routes, apart in samplers]
        canary.score(Sampler(given, version), of)
        own = Native(np.full(ROWS, ours), witness, scores, np.full_like(scores, np.nan))
        return canary._heard(own, of, exact)

    call.store = canary.store
    return call


def rounded(scores, rng, noise):
    """Return what an engine chooses whose scores differ by noise."""
    return top(scores + noise * rng.standard_normal(scores.shape))


@pytest.mark.parametrize(("noise", "share"), [(0.0, 0.0), (0.01, 0.04), (0.05, 0.2), (0.15, 0.5)])
def test_engines_that_differ_by_rounding_are_healthy(hear, scores, rng, noise, share):
    heard = hear((rounded(scores, rng, noise), np.full(ROWS, 0.02)))
    assert heard.difference == heard.settled == pytest.approx(0.02)
    assert heard.mismatch == pytest.approx(share, abs=0.05) and heard.power == heard.recorded == 1
    assert hear.store.shards() == []


def in_layer(layer, change):
    """Change the routes [S, K] of one layer."""
    return lambda w: np.concatenate([w[:layer], change(w[layer])[None], w[layer + 1 :]])


EXCHANGED = np.array([*range(5), 9, 6, 7, 8, 5, *range(10, 32)])
FAULTS = {
    "two layers exchanged": (
        lambda w: w[[0, 1, 3, 2, 4, 5, 6, 7]],
        "layer 2 has the rows of layer 3.*layer 3 has the rows of layer 2",
    ),
    "one layer twice": (lambda w: w[[0, 1, 2, 2, 4, 5, 6, 7]], "the rows of layer 2|two layers have the same routes"),
    "one token late": (lambda w: np.roll(w, 1, 1), "rows 1 token too late"),
    "a layer late": (in_layer(5, lambda w: np.roll(w, 2, 0)), "layer 5 has rows 2 tokens too late"),
    "a constant layer": (
        in_layer(4, lambda w: np.full_like(w, [3, 9, 11, 20])),
        "layer 4 has (the same experts for every token|rows that match nothing)",
    ),
    "two experts exchanged": (in_layer(6, lambda w: EXCHANGED[w]), "layer 6 has experts 5 and 9 exchanged"),
    "a wrong id in every row": (
        in_layer(3, lambda w: np.column_stack((w[:, :3], [min({*range(32)} - {*row.tolist()}) for row in w]))),
        r"layer 3 has experts that its router would not choose in 1\d\d of 245 rows",
    ),
    "another model": (
        lambda w: np.argsort(np.random.default_rng(9).random((*w.shape[:2], 32)), -1)[..., :4],
        "rows that match nothing that was tried",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_wrong_layer_is_named_and_its_routes_are_kept(hear, scores, witness, rng, name, noise):
    change, said = FAULTS[name]
    with pytest.raises((WeightSyncError, RouteValidationError), match=said) as raised:
        hear((change(rounded(scores, rng, noise)), None))
    if name != "one layer twice":
        tells(raised.value, version=3, sampler="server0")
    assert hear.store.shards() == ["canary-version000003-server0"]
    assert hear((witness, None)).mismatch == 0  # the kept shard is removed first


def test_rows_of_older_weights_are_refused(hear, witness):
    with pytest.raises(RouteValidationError, match="weight version 2"):
        hear((witness, None), version=2)


def test_the_worst_of_several_samplers_is_heard_and_those_that_do_not_record_are_counted(hear, witness):
    heard = hear((witness, None), (None, np.full(ROWS, 0.3)), (witness, np.full(ROWS, 0.1)))
    assert heard.by.endswith("server1") and heard.difference == pytest.approx(0.3)
    assert heard.recorded == pytest.approx(2 / 3) and heard.mismatch is None
    assert heard.metrics().keys() == {"sync/canary_abs_diff", "sync/canary_recorded"}
    heard = hear((witness, None), (witness, np.where(np.arange(ROWS) == 5, np.nan, 0)))
    assert heard.by.endswith("server1") and np.isnan(heard.settled)


def test_what_an_update_changed_is_measured_of_the_sampler_that_changed_least(hear):
    assert hear((None, np.full(ROWS, 0.1)), of=1).change is None
    assert hear((None, np.full(ROWS, 0.3)), of=1).change is None  # the same version once more
    moved, still = (None, np.full(ROWS, 0.7)), (None, np.full(ROWS, 0.3))
    assert hear(still, moved, of=2, ours=0.2).change == (pytest.approx(0.2), 0.0, "server0")  # server1 is new
    heard = hear(moved, (None, np.where(np.arange(ROWS) % 2, 0.7, 0.5)), of=3, ours=-0.2)
    assert heard.change == (pytest.approx(0.4), pytest.approx(0.1, abs=1e-3), "server1")
    assert heard.metrics()["sync/canary_change"] == heard.change[1]
    assert heard.metrics()["sync/canary_change_trainer"] == heard.change[0]


def test_tokens_behind_a_tie_that_fell_otherwise_do_not_count(hear, witness):
    routes, apart = witness.copy(), np.zeros(ROWS)
    routes[3, 40] = [0, 1, 2, 4]  # in the second run, at its sixth token
    apart[40:70] = 0.5
    heard = hear((routes, apart))
    assert heard.settled == 0 and heard.difference == pytest.approx(0.5 * 30 / ROWS)
    routes[3, ::35] = [0, 1, 2, 4]  # at the start of every run: now all tokens count
    assert hear((routes, apart)).settled == pytest.approx(0.5 * 30 / ROWS)


def test_the_expert_that_the_tokens_that_differ_have_taken_is_named(hear, witness):
    """A wrong expert of the sampler changes logprobs from the first token of a run that uses it."""
    takes = (witness[5] == 17).any(-1).reshape(7, 35)
    apart = np.where(np.cumsum(takes, 1) > 0, 1e-3, 1e-7).ravel()
    assert (
        hear((witness, apart), exact=1e-4).suspects == "the tokens that differ are those that take expert 17 of layer 5"
    )
    assert "every token differs" in hear((witness, np.full(ROWS, 0.1)), exact=1e-4).suspects
    scattered = np.where(np.arange(ROWS) % 35 == 20, 1.0, 0)
    assert "7 of 245 tokens differ, which no single expert explains" in hear((witness, scattered), exact=1e-4).suspects
    assert hear((witness, apart)).suspects == hear((witness, np.zeros(ROWS)), exact=1e-4).suspects == ""


@pytest.mark.parametrize("vocabulary", [1, 3, 500])
def test_experts_that_tie_are_not_called_exchanged(vocabulary):
    """Two experts have equal scores everywhere, and repeated tokens have equal rows: rounding decides many at once."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        tokens = rng.integers(0, vocabulary, 240)
        scores = rng.standard_normal((5, vocabulary, 16)).astype(np.float32)[:, tokens]
        scores[..., 3] = scores[..., 11]
        rounding = 0.1 * rng.standard_normal((2, 5, vocabulary, 16)).astype(np.float32)[:, :, tokens]
        witness, routes = (top(scores + noise) for noise in rounding)
        found, _ = compare_routes(routes, witness, scores + rounding[0], np.split(tokens, 4), range(5))
        assert found == []
