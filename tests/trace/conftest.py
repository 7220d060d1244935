from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.trace.store import ShardWriter, TraceSpec


def _random_routes(spec, rows, seed=0):
    """Routes [rows, L, K] of distinct ids, uint16."""
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, len(spec.moe_layers), spec.num_experts))
    return np.argsort(scores, axis=-1)[..., : spec.top_k].astype(np.uint16)


@pytest.fixture(scope="session")
def random_routes():
    return _random_routes


@pytest.fixture
def spec():
    return TraceSpec("tiny-0123456789abcdef", num_experts=32, top_k=4, moe_layers=(0, 1, 3))


@pytest.fixture(scope="session")
def write_shard():
    """Publish a shard of records of the given lengths; returns its path, references, routes and tokens."""

    def write(root, name, spec, lengths=(3, 2, 0, 3), seed=0, prefix="step1/prompt"):
        routes = [_random_routes(spec, rows, seed + i) for i, rows in enumerate(lengths)]
        tokens = [list(range(10 * i + seed, 10 * i + seed + rows)) for i, rows in enumerate(lengths)]
        writer = ShardWriter(root, name, spec)
        refs = [writer.add(f"{prefix}{i}:0", routes[i], tokens[i], weight_version=7) for i in range(len(lengths))]
        return SimpleNamespace(path=writer.publish(), refs=refs, routes=routes, tokens=tokens)

    return write


@pytest.fixture(scope="session")
def assert_holds():
    """Every reference of a written shard reads back as it was written."""

    def check(store, shard):
        for ref, routes in zip(shard.refs, shard.routes, strict=True):
            record = store.read(ref)
            assert record.key == ref.key and record.weight_version == 7
            np.testing.assert_array_equal(record.routes, routes)

    return check
