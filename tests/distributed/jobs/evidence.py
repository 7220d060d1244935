"""A job for two ranks: a check refuses on one of them, and they keep the evidence of it together."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch.distributed as dist

from moe_rl.config.load import load_config
from moe_rl.errors import MoeRLError, ReplayError, describe
from moe_rl.megatron import world
from moe_rl.megatron.hf_files import CheckpointReader
from moe_rl.megatron.policy import Policy
from moe_rl.models.hf import expected_tensors, read_model
from moe_rl.report import evidence_folder
from moe_rl.trace import ShardWriter, TraceSpec, TraceStore, signed
from moe_rl.train.keep_evidence import Concerned, EvidenceKeeper
from moe_rl.train.run_folder import RunFolder
from moe_rl.types import Provenance, Sequence, Span, sampled_by
from tests.distributed.jobs.canary import CONFIG, LAYOUTS


def run(layout, path, out, mib=64):
    """Return what a rank has in the end: its error with its notes, and on rank 0 what was kept."""
    facts = read_model(path)
    spec, rng = TraceSpec.of(facts), np.random.default_rng(0)
    overrides = ["train.dtype=float32", "parallel.expert=1", *(f"parallel.{one}" for one in LAYOUTS[layout])]
    config = load_config(CONFIG, [*overrides, f"model.path={path}", f"guards.evidence_mib={mib}"])
    world.lay_out(config.parallel, seed=1)
    policy = Policy(facts, config.train, config.parallel, path, temperature=1.0)
    sequences = _recorded(out, spec, facts, rng)
    keeper = EvidenceKeeper(config, RunFolder(out), policy, TraceStore(out / "trace"), spec)

    def refuse():
        if dist.get_rank() == 1:
            where = {"request": "s3", "power": "0.750", "staleness": 2}
            raise ReplayError(describe("planted", where=where, fault="alignment"))

    seen = {}
    try:
        with keeper.of(5, 4, lambda: [Concerned.of(one) for one in sequences]), world.agreed("routes"):
            refuse()
    except MoeRLError as error:
        seen |= {
            "said": str(error),
            "notes": getattr(error, "__notes__", []),
            "about": dict(error.about),
            "fault": error.message.fault,
        }
    policy.release()
    if dist.get_rank() == 0 and (folders := evidence_folder.folders(out)):
        (folder,) = folders
        kept = evidence_folder.read(folder)
        seen |= {"folder": folder.name, "kept": json.loads((folder / "evidence.json").read_text())}
        seen["rows"] = evidence_folder.read_rows(folder, kept)
        if (weights := folder / "weights/step-000004").is_dir():
            ours, theirs = CheckpointReader(weights, facts), CheckpointReader(path, facts)
            names = expected_tensors(facts)
            seen["other tensors"] = [n for n in names if not ours.whole(n).equal(theirs.whole(n).float())]
    return seen


def _recorded(out: Path, spec, facts, rng) -> list[Sequence]:
    """Make sequences with random routes of the weights of version 4, the last of them without a record."""
    (out / "trace").mkdir(exist_ok=True)
    found = []
    if dist.get_rank() == 0:
        with ShardWriter(out / "trace", "planted", spec) as writer:
            for at in range(5):
                tokens = rng.integers(0, facts.vocab, 9).tolist()
                scores = rng.random((8, len(facts.moe_layers), facts.num_experts))
                routes = np.argsort(scores, -1)[..., : facts.top_k].astype(np.uint8)
                fed = np.array(tokens[:-1], np.int32)
                ref = writer.add(f"s{at}", routes, fed, [Span(5, 4, Provenance.PREFILL), Span(3, 4, Provenance.DECODE)])
                ref = None if at == 4 else signed(ref, routes, spec.moe_layers, fed, versions=4)
                scored = np.full(4, -at, np.float32)
                versions = sampled_by(4, 4)
                found.append(Sequence(f"s{at}", tuple(tokens[:5]), tuple(tokens[5:]), scored, 0.0, versions, ref))
    return found


def failing(layout, path, out):
    """Let rank 0 fail to write, and return the error and the notes of each rank."""
    evidence_folder.write, write = SimpleNamespace, evidence_folder.write
    try:
        return run(layout, path, out)
    finally:
        evidence_folder.write = write
