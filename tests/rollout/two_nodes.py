"""Runs an engine that spans two simulated hosts: routes, an update, the loss of either. See test_two_nodes.py.

    python tests/rollout/two_nodes.py CHECKPOINT OTHER_CHECKPOINT FOLDER

Exit status: 0 if everything held, 77 if the system allows no namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx

from moe_rl.errors import ConfigError
from moe_rl.types import GenerateRequest
from tests.rollout.serving import ROOT, START_SECONDS, TOOL, Running, agree, whole_update
from tests.support.independent import Independent
from tools.dev.hosts import Host, connect, enter, wait_for

NAMES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}
NO_NAMESPACES = 77
REQUESTS = [GenerateRequest(f"r{n}", tuple(range(3 + n, 10 + 2 * n)), n, 12, 1.0, ()) for n in range(6)]
LIMITS = ["--max-model-len", "128", "--kv-cache-memory-bytes", str(64 << 20), "--block-size", "32"]


class TwoNodes:
    """Two hosts, and a node of the engine on each. The hosts are made anew for each engine."""

    def __init__(self, checkpoint: Path, folder: Path):
        folder.mkdir()
        self.ready, self.logs = folder / "ready.json", [folder / "node0.log", folder / "node1.log"]
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in NAMES.items()))
        self.hosts = [Host(name, address, names) for name, address in NAMES.items()]
        connect(self.hosts)
        subprocess.run(["ip", "address", "add", "10.77.0.254/24", "dev", "switch"], check=True)
        model = ["--model", str(checkpoint), "--trace-root", str(folder / "trace"), "--reads-text"]
        serves = ["--host", NAMES["host-a"], "--token-file", str(folder / "token"), "--json", str(self.ready)]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
        }
        self.nodes = []
        for rank, (host, log) in enumerate(zip(self.hosts, self.logs, strict=True)):
            node = ["--nnodes", "2", "--node-rank", str(rank), "--master-addr", NAMES["host-a"]]
            further = ["--", "--dtype", "float32", "--enforce-eager", *LIMITS, "--tensor-parallel-size", "2"]
            command = [sys.executable, str(TOOL), *model, *node, *([] if rank else serves), *further]
            self.nodes.append(host.start(command, environment, log, folder))

    def says(self, rank: int) -> str:
        return self.logs[rank].read_text(errors="replace")

    def running(self, folder: Path) -> Running:
        wait_for(self.ready.exists, START_SECONDS, "the server", self.nodes)
        ready = json.loads(self.ready.read_text())
        web = httpx.Client(base_url=ready["url"], timeout=30, trust_env=False)
        return Running(self.nodes[0], ready, self.logs[0], folder, web)


def main(checkpoint: Path, other: Path, folder: Path) -> None:
    """Sample before and after an update, then cut host-b's power; then host-a's while another engine starts."""
    engine = TwoNodes(checkpoint, folder / "whole")
    server = engine.running(folder)
    client = server.client(alone=True, timeout_seconds=120)
    assert client.recording().gpus == 2 and "[EP Rank 1/2]" in engine.says(1)
    agree(server.store, Independent(checkpoint), client.generate(REQUESTS, shard="old"))
    held = client.update_weights(whole_update(server, other, 1, 0))
    assert (held.version, held.whole, held.refused) == (1, True, ""), held
    agree(server.store, Independent(other), client.generate(REQUESTS, shard="new"), version=1)
    engine.hosts[1].kill()
    assert engine.nodes[0].wait(60) == 3 and "node 1 (host-b) is gone" in engine.says(0), engine.says(0)[-3000:]
    engine.hosts[0].kill()

    engine = TwoNodes(checkpoint, folder / "starting")
    wait_for(lambda: "node 1 of 2 works for" in engine.says(1), START_SECONDS, "both nodes", engine.nodes)
    engine.hosts[0].kill()
    assert engine.nodes[1].wait(60) == 3 and "node 0 (10.77.0.1:29600) is gone" in engine.says(1)


if __name__ == "__main__":
    try:
        enter([__file__, *sys.argv[1:]])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(NO_NAMESPACES)
    main(*map(Path, sys.argv[1:]))
