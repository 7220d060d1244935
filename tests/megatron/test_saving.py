"""The writer of a checkpoint by itself; whole checkpoints: tests/distributed/test_state.py."""

import queue
from types import SimpleNamespace

import pytest
import torch

from moe_rl.megatron.saving import _Writer


@pytest.mark.parametrize("copy, seen", [(True, 1.0), (False, 0.0)])
def test_what_is_written_behind_the_run_is_what_was_there_when_the_save_began(tmp_path, copy, seen):
    """Without a copy the trainer's next step would be written: the witness that the tensor did change."""
    tensor, file, written = torch.ones(4), tmp_path / "__0_0.distcp", []

    def write(_, buckets, results):
        for path, _, (_, tensors) in buckets:
            written.extend(float(value.mean()) for _, value in tensors)
            torch.save({}, path)
        results.put((0, {}))

    buckets = [(str(file), "key", ([], [("item", tensor)]))]
    request = SimpleNamespace(async_fn=write, async_fn_args=(0, buckets, queue.Queue()))
    writer = _Writer(request, tmp_path, {}, copy=copy)
    tensor.zero_()
    writer.run()
    assert (writer.failure, list(writer.digests)) == ("", [file.name])
    assert written == [seen]
