"""Tests the writer of a checkpoint by itself; tests/distributed/test_state.py tests whole checkpoints."""

import resource
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from moe_rl import messages
from moe_rl.megatron import behind, checkpoint
from moe_rl.megatron.behind import Writer
from moe_rl.megatron.saving import _HandedIn, _Pinned, _RankPart, _storages
from moe_rl.whereabouts import HERE
from tests.support import pretend_cuda


def request_of(folder, tensor):
    """Return Megatron's write request for a rank with one tensor."""
    size = tensor.shape
    data = TensorWriteData(ChunkStorageMetadata(torch.Size([0]), size), TensorProperties(tensor.dtype), size)
    item = WriteItem(MetadataIndex("weight"), WriteItemType.TENSOR, tensor_data=data)
    file = folder / "__0_0.distcp"
    return SimpleNamespace(
        async_fn=partial(FileSystemWriterAsync.write_preloaded_data_multithread, [_StorageWriterTransforms()], False),
        async_fn_args=[0, [(str(file), file.name, ([], [(item, tensor)]))]],
    )


@pytest.mark.parametrize("used, seen", [(True, 1.0), (False, 0.0)])
def test_what_is_written_behind_the_run_is_what_was_there_when_the_save_began(tmp_path, used, seen):
    """Without a copy, the trainer's next step would be written. The control checks that the tensor did change."""
    tensor = torch.ones(4)
    in_use = _storages({"model": [SimpleNamespace(data=tensor if used else b"")]})
    writer = Writer(tmp_path, _RankPart(request_of(tmp_path, tensor), tmp_path, {}, in_use, _Pinned()), rank=3)
    tensor.zero_()
    writer.run()
    part = messages.decode((tmp_path / "rank3.part").read_bytes(), _HandedIn)
    assert (writer.failure, part.digests) == ("", {})
    assert torch.load(tmp_path / "__0_0.distcp").tolist() == [seen] * 4
    (written,) = [item.result() for item in part.items]
    assert written.index.fqn == "weight" and written.storage_data.relative_path == "__0_0.distcp"
    assert [item.digest for item in part.items] == [checkpoint.digest(tmp_path / "__0_0.distcp")]


def test_megatrons_own_tensors_do_not_stay_beside_the_copies(tmp_path):
    """The request outlives the write, and its tensors were gathered from all ranks."""
    gathered = torch.ones(4)
    request, alive = request_of(tmp_path, gathered), weakref.ref(gathered)
    del gathered
    assert alive() is not None
    in_use = _storages({"optimizer": SimpleNamespace(data=alive())})
    writer = Writer(tmp_path, _RankPart(request, tmp_path, {}, in_use, _Pinned()), rank=0)
    assert alive() is None
    writer.run()
    assert writer.failure == "" and torch.load(tmp_path / "__0_0.distcp").tolist() == [1.0] * 4


def test_a_gpu_copies_into_pinned_memory_that_the_next_save_reuses_and_the_host_waits_once(tmp_path, monkeypatch):
    """The pretend device poisons a copy that nobody waited for, and counts the wait of each copy that is not pinned."""
    monkeypatch.setattr(_Pinned, "BLOCK", 128)
    with pretend_cuda.installed() as device:
        pinned, places = _Pinned(), []
        for save in range(2):
            shapes = [(4,), (2, 3), (40,), (5,)]  # the third needs a block of its own
            tensors = [torch.full(shape, n + 10.0 * save, device="cuda") for n, shape in enumerate(shapes)]
            values = [tensor.tolist() for tensor in tensors]
            request = request_of(tmp_path, torch.ones(4))
            ((path, key, (blobs, [(item, _)])),) = request.async_fn_args[1]
            request.async_fn_args[1] = [(path, key, (blobs, [(item, tensor) for tensor in tensors]))]
            in_use = _storages({"model": [SimpleNamespace(data=tensor) for tensor in tensors]})
            device.syncs.clear()
            part = _RankPart(request, tmp_path, {}, in_use, pinned)
            assert sum(device.syncs.values()) == 1
            copies = [copy for *_, (_, pairs) in part.buckets for _, copy in pairs]
            assert [copy.tolist() for copy in copies] == values and all(copy.is_pinned() for copy in copies)
            # torch writes the whole storage of a tensor
            assert [copy.untyped_storage().nbytes() for copy in copies] == [tensor.nbytes for tensor in tensors]
            places.append([copy.data_ptr() for copy in copies])
        assert places[0] == places[1] and [block.nbytes for block in pinned._blocks] == [128, 192, 128]
        assert not device.faults


def test_a_write_that_the_system_refuses_is_told_in_its_words(tmp_path):
    """A file size limit acts as a full disk: the system refuses a write in the middle of a tensor."""
    writer = Writer(
        tmp_path, _RankPart(request_of(tmp_path, torch.ones(1 << 20)), tmp_path, {}, set(), _Pinned()), rank=0
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        writer.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "OSError: [Errno 27] File too large" in writer.failure
    assert writer.failure.startswith("a limit to the size of files is reached") and "bytes free" in writer.failure
    assert writer.written.is_set() and writer.done.is_set() and not list(tmp_path.glob("*.part"))


def test_a_rank_that_waits_for_a_slow_disk_moves_while_the_files_grow(tmp_path, monkeypatch):
    monkeypatch.setattr(behind, "_SIZE_SECONDS", 0.02)
    release, path = threading.Event(), tmp_path / "slow"

    def write():
        for size in range(1, 4):
            path.write_bytes(b"x" * size)
            release.wait(0.2)
        release.wait(0.3)
        return b""

    writer, moves = Writer(tmp_path, write, rank=0), HERE.moves
    writer.start()
    writer.wait(writer.written)
    assert writer.failure == "" and 3 <= HERE.moves - moves < 15  # it looked more often


def test_a_piece_that_is_read_is_a_move(tmp_path):
    """A large checkpoint may take hours. A rank that reads on must not count as one that hangs."""
    path, moves = tmp_path / "__0_0.distcp", HERE.moves
    path.write_bytes(b"abc")
    with path.open("rb") as file:
        piece = checkpoint._piece({path.name: {"1-3": checkpoint.digest(path, 1, 3)}}, file, 1, 2)
    assert piece.read() == b"bc" and HERE.moves == moves + 1
