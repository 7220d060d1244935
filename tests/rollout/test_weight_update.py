"""Weights into the running engine: exactly what was sent, or refused with the old ones still in place."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file

from moe_rl.errors import WeightSyncError
from moe_rl.sync.weights import expected_digest, write_part

pytestmark = pytest.mark.slow

CANARY = np.random.default_rng(9).integers(0, 512, 64).tolist()


def send(engine, folder, tensors, version, parts=2):
    """Write tensors as `parts` files and load them. Returns the paths."""
    names = sorted(tensors)
    paths = [folder / f"v{version}-{at}.safetensors" for at in range(parts)]
    for at, path in enumerate(paths):
        write_part(path, {name: tensors[name] for name in names[at::parts]})
    engine.update_weights(paths, version, expected_digest(paths))
    return paths


@pytest.fixture(scope="session")
def weights(checkpoint):
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture
def restored(engine, weights, tmp_path):
    """The shared engine, with its first weights back when the test is over."""
    yield engine
    send(engine, tmp_path, weights, 0)


def test_same_weights_leave_every_bit(restored, weights, requests_of, tmp_path):
    requests = requests_of(4, 4)
    before, scored = restored.generate(requests, shard="same-0"), restored.score(CANARY)
    send(restored, tmp_path, weights, 1)
    np.testing.assert_array_equal(restored.score(CANARY), scored)
    for one, other in zip(before, restored.generate(requests, shard="same-1"), strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert (one.weight_version, other.weight_version) == (0, 1)


def test_new_weights_are_sampled_from(restored, other_checkpoint, other_reference, settings, requests_of, tmp_path):
    from moe_rl.trace import TraceStore

    before = restored.score(CANARY)
    send(restored, tmp_path, load_file(other_checkpoint / "model.safetensors"), 41)
    routes, logprobs = other_reference(CANARY)
    np.testing.assert_allclose(restored.score(CANARY), logprobs, rtol=0, atol=1e-4)
    assert np.abs(before - logprobs).mean() > 0.1
    # The same prompts were cached under the old weights: none of their rows may come back.
    for completion in restored.generate(requests_of(4, 4), shard="new"):
        tokens = completion.prompt_token_ids + completion.token_ids
        record = TraceStore(settings.trace_root).read(completion.routes)
        np.testing.assert_array_equal(np.sort(record.routes, -1), other_reference(tokens)[0][:-1])
        assert completion.weight_version == 41 and {span.weight_version for span in record.spans} == {41}


def test_one_changed_expert_is_seen_by_the_canary(restored, reference, weights, tmp_path):
    """Moving the weights of a single expert moves the canary, if its tokens go there at all."""
    before = restored.score(CANARY)
    expert = np.bincount(reference(CANARY)[0][:, 2].ravel()).argmax()
    name = f"model.layers.2.mlp.experts.{expert}.down_proj.weight"
    send(restored, tmp_path, weights | {name: weights[name] * 1.5}, 2)
    assert np.abs(restored.score(CANARY) - before).max() > 1e-4


@pytest.mark.parametrize(
    "fault, message",
    [
        ("digest", "other weights than were sent.*expected"),
        ("byte", "other weights than were sent.*digest"),
        ("missing", "lack tensors of the model.*experts.3.up_proj.weight"),
        ("extra", "hold tensors that the model has not.*surplus"),
        ("shape", r"of another shape.*norm.weight \(32,\) for \(64,\)"),
        ("truncated", "missing or damaged.*v7-1"),
        ("gone", "missing or damaged.*v7-1"),
        ("twice", "lies in two parts"),
    ],
)
def test_wrong_weights_are_refused_and_the_old_ones_stay(engine, weights, requests_of, tmp_path, fault, message):
    before = engine.score(CANARY)
    tensors = {name: tensor * 1.25 for name, tensor in weights.items()}
    if fault == "missing":
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    elif fault == "extra":
        tensors["surplus"] = tensors["model.norm.weight"]
    elif fault == "shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:32]
    names = sorted(tensors)
    parts = [tmp_path / "v7-0", tmp_path / "v7-1"]
    write_part(parts[0], {name: tensors[name] for name in names[::2]})
    write_part(parts[1], {name: tensors[name] for name in names[1::2]})
    digest = expected_digest(parts)
    if fault == "digest":
        digest = digest[::-1]
    elif fault == "byte":
        content = bytearray(parts[1].read_bytes())
        content[-1000] ^= 1
        parts[1].write_bytes(content)
    elif fault == "truncated":
        parts[1].write_bytes(parts[1].read_bytes()[:-1])
    elif fault == "gone":
        parts[1].unlink()
    elif fault == "twice":
        parts.append(parts[0])
    with pytest.raises(WeightSyncError, match=f"(?s){message}.*pid {engine.pid}"):
        engine.update_weights(parts, 7, digest)
    np.testing.assert_array_equal(engine.score(CANARY), before)
    (completion,) = engine.generate(requests_of(1, 1), shard=f"refused-{fault}")
    assert completion.weight_version == 0
