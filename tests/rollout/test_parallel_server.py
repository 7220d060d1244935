"""Tests a server with two tensor- and expert-parallel workers: both receive and confirm the weights, one records.

One server runs for the whole module; the last test ends it. Its second worker can be given other bytes than the first,
see faulty_server.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

from moe_rl.errors import EngineError
from moe_rl.weights.broadcast import Sender
from moe_rl.weights.digest import info_of
from moe_rl.weights.update import Holding, Received, TensorInfo, WeightUpdate
from tests.rollout.faulty_server import DAMAGED, UNLUCKY
from tests.rollout.serving import Running, agree, serving, whole_update
from tests.support.independent import Independent
from tests.weights.sending import in_buckets, in_turns

# The first test waits for the server, which on a busy machine takes long.
pytestmark = [pytest.mark.long, pytest.mark.timeout(700)]

WORKERS = 2


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    layout = ("--tensor-parallel-size", str(WORKERS), "--enable-expert-parallel")
    tool = Path(__file__).with_name("faulty_server.py")
    with serving(checkpoint, tmp_path_factory.mktemp("server"), *layout, tool=tool) as running:
        yield running


@pytest.fixture(scope="module")
def models(reference, other_reference) -> list[Independent]:
    return [reference, other_reference]


def sample(server: Running, model: Independent, requests, shard: str, *, version: int = 0) -> list[tuple[int, ...]]:
    """Sample, compare with `transformers`, and return the tokens."""
    client = server.client(alone=True, timeout_seconds=60)
    completions = client.generate(requests, shard=shard)
    agree(server.store, model, completions, version=version)
    assert all(len(one.routes.parts) == 1 and one.newest_version == version for one in completions)
    tokens = completions[0].prompt_token_ids + completions[0].token_ids
    model(tokens).check_logprobs("score", asyncio.run(client.score([tokens])).logprobs[0], atol=1e-5)
    return [one.token_ids for one in completions]


def by_disk(server: Running, checkpoint: Path, version: int, replaces: int) -> Holding:
    return server.client().update_weights(whole_update(server, checkpoint, version, replaces))


def by_broadcast(server: Running, checkpoint: Path, version: int, replaces: int) -> Holding:
    """Send an update as the trainer's rank 0 does, in several buckets."""
    client, tensors, stopped = server.client(), load_file(checkpoint / "model.safetensors"), threading.Event()
    digests = [info_of(name, tensor) for name, tensor in tensors.items()]
    infos = [TensorInfo(info.name, info.dtype, info.shape) for info in digests]
    sender, sent = Sender(0, "127.0.0.1", client.recording().gpus, torch.device("cpu")), []
    buckets = in_buckets(infos, 1 << 20)
    thread = threading.Thread(target=lambda: sent.append(sender.send(buckets, iter(tensors.items()), stopped)))
    thread.start()
    try:
        announced = WeightUpdate(version, replaces, 0, False, False, infos, in_turns(buckets, sender))
        held = client.update_weights(announced)
        assert not held.whole and not held.refused, held
        return client.update_weights(
            msgspec.structs.replace(announced, number=1, final=True, tensors=digests, source=Received())
        )
    finally:
        stopped.set()
        thread.join(20)
        sender.close()
        assert sent == [True]


@contextmanager
def adopted(server: Running, checkpoint: Path):
    """A server adopted by a new run; afterwards its first weights are restored."""
    try:
        asyncio.run(server.client().adopt())
        yield
    finally:
        asyncio.run(server.client().adopt())
        assert by_disk(server, checkpoint, 0, 0).whole


def test_each_worker_has_half_of_the_experts_and_one_records(server, models, requests_of):
    log = server.log.read_text(errors="replace")
    assert "[EP Rank 0/2] Expert parallelism is enabled" in log and "Local/global number of experts: 8/16" in log
    assert server.client().recording().gpus == WORKERS
    (stats,) = server.client().stats()
    sample(server, models[0], requests_of(4, 4, max_tokens=24), "routes")
    assert server.client().stats()[0]["recorded"] - stats.get("recorded", 0) == 16


@pytest.mark.parametrize("update", [by_disk, by_broadcast])
def test_new_weights_reach_both_workers(server, models, checkpoint, other_checkpoint, requests_of, update):
    requests, name = requests_of(1, 3, max_tokens=8), update.__name__
    old = sample(server, models[0], requests, f"{name}-old")
    with adopted(server, checkpoint):
        held = update(server, other_checkpoint, 5, 0)
        assert (held.version, held.whole, held.refused) == (5, True, "")
        assert server.client().recording().weight_digest == held.digest != ""
        assert sample(server, models[1], requests, f"{name}-new", version=5) != old
        # Versions rise on from there, on both of them.
        assert update(server, checkpoint, 6, 5).whole
        assert sample(server, models[0], requests, f"{name}-back", version=6) == old


@pytest.mark.parametrize("update", [by_disk, by_broadcast])
def test_a_worker_that_got_other_bytes_is_found_out(server, models, checkpoint, other_checkpoint, requests_of, update):
    """The other worker has loaded what was sent. The server then holds two sets of weights and samples from neither."""
    requests = requests_of(1, 2, max_tokens=4)
    with adopted(server, checkpoint):
        held = update(server, other_checkpoint, UNLUCKY, 0)
        assert not held.whole
        assert "workers of one sampler hold different weights" in held.refused
        assert f"got other weights than were sent (tensor {DAMAGED})" in held.refused
        assert f"version {UNLUCKY}" in held.refused and "version 0" in held.refused
        with pytest.raises(EngineError, match="weights are incomplete"):
            server.client().generate(requests, shard=f"{update.__name__}-torn")
        with pytest.raises(EngineError, match="weights are incomplete"):
            asyncio.run(server.client().score([[1, 2, 3]]))
    sample(server, models[0], requests, f"{update.__name__}-mended")


def test_workers_listen_on_loopback(server):
    found = [
        (process.pid, connection.laddr.ip)
        for process in server.processes()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len({pid for pid, _ in found}) > WORKERS, "the witness: workers talk to each other, beside the server"
    assert all(ipaddress.ip_address(address).is_loopback for _, address in found), found


def test_it_ends_and_leaves_nothing(server):
    """The last test of the module: processes, files in the temporary folder, memory that its workers share."""
    processes = server.processes()
    maps = {mapped.path for process in processes for mapped in process.memory_maps()}
    shared = [Path(path) for path in maps if path.startswith("/dev/shm/") and Path(path).exists()]
    assert len(processes) > WORKERS + 1 and shared and any(server.temporary.iterdir()), "the witness"
    server.process.terminate()
    assert server.process.wait(60) == 0
    _, left = psutil.wait_procs(processes[1:], timeout=5)
    assert [process for process in left if process.status() != psutil.STATUS_ZOMBIE] == []
    assert [path for path in shared if path.exists()] == [] == list(server.temporary.iterdir())
