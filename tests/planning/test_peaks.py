"""Tests which shares send to which copy of the experts, and which records make a step. Other tests compare the peaks
with real runs."""

from contextlib import ExitStack

import numpy as np
import pytest

from moe_rl.config.load import load_config
from moe_rl.config.training import ParallelConfig
from moe_rl.models.hf import read_model
from moe_rl.planning.peaks import dispatching_groups, peaks
from moe_rl.trace import ShardWriter, TraceSpec
from moe_rl.types import Provenance, Span


@pytest.mark.parametrize(
    ("parallel", "shares", "groups"),
    [
        ({"expert": 2}, 4, [{0, 1}, {2, 3}]),
        ({"expert": 2, "expert_tensor": 2}, 4, [{0, 1, 2, 3}]),
        ({"tensor": 2, "expert": 2}, 2, [{0}, {1}]),
        ({"tensor": 2, "expert": 4}, 2, [{0, 1}]),
        ({"tensor": 2}, 2, [{0}, {0}, {1}, {1}]),
        ({"tensor": 4, "expert": 6}, 3, [{0, 1}, {1, 2}]),
    ],
)
def test_shares_that_dispatch_to_the_same_experts(parallel, shares, groups):
    """Expected by hand: the ranks of a share are neighbours, and so are those of a copy of the experts."""
    found = dispatching_groups(ParallelConfig(**parallel), shares)
    assert [set(range(shares)[one]) for one in found] == groups


SHARDS = {
    "one shard": lambda prompt, member: "step000001",
    "servers and rounds": lambda prompt, member: f"step000001{'-round2' * (prompt > 2)}-server{member}",
    "groups": lambda prompt, member: f"group{prompt:06d}-0",
}


@pytest.mark.parametrize("kind", [*SHARDS, "stages", "turns"])
def test_a_step_is_packed_whole_wherever_its_records_are(tmp_path, kind):
    config = load_config("tiny_moe_cpu", ["rollout.prompts_per_step=4", "train.microbatch_tokens=64"])
    facts = read_model(config.model.path)
    spec, rng = TraceSpec.of(facts), np.random.default_rng(0)
    layers = spec.moe_layers
    parts = {"": layers} if kind != "stages" else {".pp0of2": layers[:3], ".pp1of2": layers[3:]}
    scores = rng.random((4, 2, 20, len(layers), facts.num_experts))
    routes = np.argsort(scores, -1)[..., : facts.top_k].astype(np.uint8)

    def stored(folder, name_of, parts, turns=False):
        with ExitStack() as stack:
            writers = {}
            for prompt, member in np.ndindex(4, 2):
                for suffix, own in parts.items():
                    name = name_of(prompt, member) + suffix
                    if name not in writers:
                        writers[name] = stack.enter_context(ShardWriter(folder, name, spec, layers=own))
                    rows = routes[prompt, member][:, [layers.index(layer) for layer in own]]
                    key, ids, parent = f"p{prompt}/c{member}", np.arange(20, dtype=np.int32), None
                    if turns:  # the second turn continues the first
                        span = [Span(8, 0, Provenance.DECODE)]
                        parent = writers[name].add(f"{key}-0", rows[:8], ids[:8], span)
                        rows, ids = rows[8:], ids[8:]
                    span = [Span(len(ids), 0, Provenance.DECODE)]
                    writers[name].add(key, rows, ids, span, parent=parent)
        return peaks(config, facts, 2, str(folder))

    whole = stored(tmp_path / "whole", SHARDS["one shard"], {"": layers})
    assert (whole.batches, whole.sequences) == (1, 8)
    assert stored(tmp_path / "parts", SHARDS.get(kind, SHARDS["one shard"]), parts, kind == "turns") == whole
