from types import SimpleNamespace

import numpy as np
import pytest

from moe_rl.trace import ShardWriter, TraceSpec
from moe_rl.types import Provenance, Span


def _random_routes(spec, rows, seed=0, layers=None):
    """Return routes [rows, L, K] of distinct ascending ids, uint16."""
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, len(spec.moe_layers) if layers is None else layers, spec.num_experts))
    return np.sort(np.argsort(scores, axis=-1)[..., : spec.top_k]).astype(np.uint16)


def _decoded(rows, version=7):
    return [Span(rows, version, Provenance.DECODE)] if rows else []


@pytest.fixture(scope="session")
def random_routes():
    return _random_routes


@pytest.fixture(scope="session")
def decoded():
    """Return the spans of `rows` rows that one version of the weights decoded."""
    return _decoded


@pytest.fixture
def spec():
    return TraceSpec("tiny-0123456789abcdef", num_experts=32, top_k=4, layer_map="mmdm")


@pytest.fixture(scope="session")
def write_shard():
    """Publish a shard of records with the given lengths, in chunks of 2 layers and 2 tokens.

    The last record continues the first two rows of the first one and has an aux array. Returns the path, the references
    and the expected content.
    """

    def write(root, name, spec, lengths=(3, 2, 0, 3), seed=0, prefix="step1/prompt", **layout):
        layout = {"layer_group": 2, "token_block": 2} | layout
        routes = [_random_routes(spec, rows, seed + i) for i, rows in enumerate(lengths)]
        tokens = [np.arange(10 * i + seed, 10 * i + seed + rows) for i, rows in enumerate(lengths)]
        aux = np.arange(5, dtype=np.float32) + seed
        writer, refs = ShardWriter(root, name, spec, **layout), []
        for i, rows in enumerate(lengths):
            key = f"{prefix}{i}:0"
            if i and i == len(lengths) - 1:
                parent = refs[0].__class__(refs[0].key, min(2, lengths[0]), refs[0].parts)
                routes[i] = np.concatenate([routes[0][: parent.rows], routes[i]])
                tokens[i] = np.concatenate([tokens[0][: parent.rows], tokens[i]])
                refs.append(
                    writer.add(
                        key,
                        routes[i][parent.rows :],
                        tokens[i][parent.rows :],
                        _decoded(rows),
                        parent=parent,
                        aux={"logprobs": aux},
                    )
                )
                writer.mark_aborted(key)
            else:
                refs.append(writer.add(key, routes[i], tokens[i], _decoded(rows)))
        return SimpleNamespace(path=writer.publish(), refs=refs, routes=routes, tokens=tokens, aux=aux)

    return write


@pytest.fixture(scope="session")
def assert_holds():
    """Check that every reference of a written shard reads back as it was written."""

    def check(store, shard):
        for ref, routes, tokens in zip(shard.refs, shard.routes, shard.tokens, strict=True):
            record = store.read(ref)
            assert record.key == ref.key and record.spans == tuple(_decoded(len(routes)))
            assert record.aborted == (ref is shard.refs[-1] and len(shard.refs) > 1)
            np.testing.assert_array_equal(record.routes, routes)
            np.testing.assert_array_equal(record.token_ids, tokens)

    return check
