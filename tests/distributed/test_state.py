"""What outlives a step, when ranks share tensors: the weights that the sampler gets, the reference, a checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moe_rl.config.schema import ParallelConfig
from tests.distributed.conftest import torchrun
from tests.distributed.test_policy import merged, worst

SCRIPT = Path(__file__).with_name("state_worker.py")


@pytest.mark.parametrize(
    "parallel, writers",
    [
        # rank 0 writes everything but the experts of rank 1
        pytest.param(ParallelConfig(tensor=2, expert=2), 2, id="TP2-EP2"),
        # rank 0 collects every matrix
        pytest.param(ParallelConfig(tensor=2, expert_tensor=2), 1, id="TP2-ETP2"),
        # each stage writes its layers
        pytest.param(ParallelConfig(pipeline=2, virtual_pipeline=2), 2, id="PP2-VPP2"),
    ],
)
def test_weights_reference_and_checkpoint(checkpoint, reference, tmp_path, parallel, writers):
    process = torchrun(2, checkpoint, tmp_path, parallel.model_dump_json(), script=SCRIPT)
    assert process.returncode == 0, process.stderr[-3000:]
    seen = [torch.load(tmp_path / f"rank{r}.pt") for r in range(2)]

    # the sampler gets the checkpoint that the ranks cut up, whole and bit for bit
    original = load_file(checkpoint / "model.safetensors")
    sent = seen[0]["weights"]
    assert sent.keys() == original.keys()
    assert all(torch.equal(sent[name], original[name]) for name in original)
    assert len(seen[0]["writers"]) == writers and not list((tmp_path / "parts").iterdir())

    logprobs, _ = reference(forced=False)
    assert worst(merged(seen, "logprobs"), logprobs) < 2e-5

    for rank in seen:
        straight, again = rank["norms"]
        assert straight == again and straight[0] != straight[1]
        through, resumed = rank["final"]
        assert through.keys() == resumed.keys()
        assert all(torch.equal(through[name], resumed[name]) for name in through)
    assert sum(len(rank["final"][0]) for rank in seen) >= len(original)
