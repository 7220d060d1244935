"""The processes of tests/train/test_peers.py: ranks without a training run, and the process that holds their store."""

import ctypes
import json
import os
import socket
import sys
import time
from datetime import timedelta

from torch.distributed import TCPStore

from moe_rl.errors import EngineError
from moe_rl.train.peers import Peers, StopRequested, connect
from moe_rl.whereabouts import HERE


def hold_store(out, errors):
    _print_into(out, errors)
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5), wait_for_workers=False)
    print(store.port, flush=True)
    time.sleep(300)


def beside(out, errors, port, folder):
    """Start rank 0 of two as a child of this process."""
    if os.fork() == 0:
        run_rank(out, errors, port, folder, 0, "sleep", 2, False)
    os.wait()


def run_rank(out, errors, port, folder, rank, how, count, apart):
    """Act as a rank in a step, and do what `how` says. With `apart`, each rank is on its own host."""
    _print_into(out, errors)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if apart:
        socket.gethostname = lambda: f"host{rank}"
    near = range(rank, rank + 1) if apart else None
    grace = {"patient": 60, "settling": 12}.get(how, 3)
    try:
        with Peers(
            folder,
            rank,
            count,
            timeout_seconds=2,
            grace_seconds=grace,
            hang_seconds=2 if how.startswith("hang") else 600,
            evidence=lambda: ({"group": 4 if how == "hang late" else 5}, b"{}"),
            near=near,
        ) as peers:
            peers.save_took(0.1)
            with peers.phase("train", 7, seconds=60 if how == "long step" else 0):
                store = connect(folder)
                print("ready", flush=True)
                _do(how, peers, store)
    except EngineError:
        if how == "fail slowly":
            time.sleep(1.5)  # engine and groups are closed before anyone prints the error
        raise


def _do(how, peers, store):
    if how.startswith("blow"):
        _, number, holder = how.split()
        os.kill(int(holder), int(number))
        raise EngineError("planted")
    if how.startswith("fail"):
        time.sleep(1)
        raise EngineError("planted")
    if how == "broken by a failure":
        while _second(store).get("phase") != "failed":
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
    if how == "broken off":
        time.sleep(1)
        raise RuntimeError("Connection closed by peer")
    if how == "broken collective":
        while True:
            try:
                time.sleep(0.05)
                os.kill(_second(store).get("pid", os.getpid()), 0)
            except ProcessLookupError:
                raise RuntimeError("Connection closed by peer") from None
    if how == "hear":
        while _second(store).get("phase") != "finished":
            time.sleep(0.01)
        print("rank 1 finished", flush=True)
    if how.startswith("hang"):
        for number in range(2):  # the second time, there is a measure
            peers.part("update")
            HERE.begin_microbatch(number)
            HERE.begin_layer(3 if how == "hang late" else 5)
            time.sleep(0.6)
    if how in ("sampling", "settling"):
        try:
            with peers.to_be_left(late=how == "settling"):
                time.sleep(60)
        except StopRequested:
            print("left", flush=True)
    if how == "in a collective":
        ctypes.CDLL(None).sleep(60)  # no signal handler runs before this returns
    time.sleep(1 if how == "finish" else 60)


def _second(store):
    """Return the state that rank 1 reports."""
    return json.loads(store.get("1") or "{}")


def _print_into(out, errors):
    for path, stream in ((out, sys.stdout), (errors, sys.stderr)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
