"""A job for two ranks: route the canary under a layout, and compare it with a sampler's record."""

from pathlib import Path

import numpy as np
import torch.distributed as dist

from moe_rl.config.load import load_config
from moe_rl.errors import WeightSyncError
from moe_rl.megatron import world
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import read_model
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore
from moe_rl.train.canary import Canary
from moe_rl.types import Provenance, ScoredTokens, Span

CONFIG = Path(__file__).parents[3] / "configs/tiny_moe_cpu.yaml"
LAYOUTS = {
    "EP2": ["expert=2"],
    "TP2": ["tensor=2"],
    "PP2": ["pipeline=2"],
    "PP2 VPP2": ["pipeline=2", "virtual_pipeline=2"],
    "CP2": ["context=2"],
}


class Recorded:
    """Publishes given routes int64 [L, S, K] of the runs, and says that all log-probabilities are 0."""

    def __init__(self, store, out, spec, routes, version):
        self.store, self.out, self.spec, self.routes, self.version = store, out, spec, routes, version

    def score(self, runs, *, shard=None):
        ends = np.cumsum([len(run) - 1 for run in runs])[:-1]
        parts = np.split(self.routes.transpose(1, 0, 2).astype(np.uint8), ends)
        with ShardWriter(self.out / "trace", shard, self.spec) as writer:
            refs = []
            for at, (run, part) in enumerate(zip(runs, parts, strict=True)):
                spans = [Span(len(part), self.version, Provenance.PREFILL)]
                refs.append(writer.add(f"scored/{at}", part, np.array(run[:-1], np.int32), spans))
        return [ScoredTokens([np.zeros(len(run) - 1, np.float32) for run in runs], refs, "the sampler")]


def run(layout, path, out):
    """What this rank makes of the canary in a layout of LAYOUTS. The sampler here records what it is given."""
    facts = read_model(path)
    spec, rng = TraceSpec.of(facts), np.random.default_rng(0)
    runs = [tuple(rng.integers(0, facts.vocab, length).tolist()) for length in (50, 64, 33, 2, 64)]
    overrides = ["train.dtype=float32", "parallel.expert=1", *(f"parallel.{one}" for one in LAYOUTS[layout])]
    config = load_config(CONFIG, overrides)
    world.lay_out(config.parallel, seed=1)
    policy = Policy(facts, config.train, config.parallel, path, temperature=1.0)
    store = TraceStore(out / "trace")
    (out / "trace").mkdir(exist_ok=True)
    canary = Canary(runs, store, spec)
    own = canary.natively(policy, 3)
    routes = own.chosen
    swapped = routes[[0, 2, 1, *range(3, len(routes))]]
    heard = canary.compare(own, Recorded(store, out, spec, routes, 3) if dist.get_rank() == 0 else None, 3)
    seen = {
        "logprobs": own.logprobs,
        "routes": routes,
        "scores": own.scores,
        "heard": heard.metrics(),
        "shards": store.shards(),
    }
    if dist.get_rank() == 0:
        try:
            canary.score(Recorded(store, out, spec, swapped, 3), 3)
            canary._heard(own, 3, 0.0)
        except WeightSyncError as error:
            seen |= {"said": str(error), "kept": store.shards()}
            store.remove(*store.shards())
    policy.release()
    return seen
