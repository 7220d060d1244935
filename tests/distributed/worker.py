"""The ranks of worlds that do jobs: see ranks.py, which starts this and asks for worlds.

A line [FOLDER, RANKS, PID] of the standard input starts a world: an agent and its ranks, all forked from this process,
which has imported what the jobs need and has no threads. The answer is the pid of the agent.

Job n is the file FOLDER/<n>.job: a pickled function and its arguments. Rank r writes what the function returns to
FOLDER/<n>-rank<r>.pt, or its traceback to FOLDER/<n>-rank<r>.error, and then ends. A rank that takes no further job
makes FOLDER/<n>-rank<r>.left. A job lays out its own parallel groups.

PID: of the process that gives the jobs; without it the ranks end.

Where there is a GPU, each rank begins anew after its fork: a driver does not work in a fork of a process that asked for
it, and imports ask.
"""

import gc
import importlib
import itertools
import json
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from moe_rl.megatron import world
from tests.distributed.ranks import Leave

# Jobs leave threads of gloo behind: a few each, and each takes processor time.
THREADS = 80
JOBS = [f"tests.distributed.jobs.{path.stem}" for path in Path(__file__).parent.glob("jobs/*.py")]


def main() -> None:
    for name in ("tests.support.planted", *JOBS):
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1 or torch.cuda.is_available(), "an import started a thread, which forked ranks would not have"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # agents that ended leave no zombies
    for line in sys.stdin:
        folder, ranks, giver = json.loads(line)
        agent = os.fork()
        if not agent:
            _be_agent(Path(folder), ranks, giver)
        print(agent, flush=True)


def _be_agent(folder: Path, ranks: int, giver: int) -> NoReturn:
    """Act as torchrun does: hold the store, fork the ranks, and end all of them with the first that fails."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    with (folder / "log").open("wb") as log, open(os.devnull, "rb") as nothing:
        for number, file in enumerate((nothing, log, log)):
            os.dup2(file.fileno(), number)
    ports, agent = [], os.getpid()
    for rank in range(ranks):
        read, write = os.pipe()
        if not os.fork():
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"MASTER_PORT": os.read(read, 16).decode(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            if torch.cuda.is_available():
                os.execv(sys.executable, [sys.executable, "-u", __file__, str(folder), str(giver), str(agent)])
            _be_rank(folder, giver, agent)
        ports.append(write)
    # The store has threads, so it comes after the forks.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for write in ports:
        os.write(write, str(store.port).encode())
    failed = False
    for _ in range(ranks):
        failed = failed or os.wait()[1] != 0
        if failed:
            time.sleep(0.2)  # others that fail as well say why
            os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _be_rank(folder: Path, giver: int, agent: int) -> NoReturn:
    try:
        world.join(timeout_seconds=300)
        _do_jobs(folder, Path("/proc") / str(giver), agent)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _do_jobs(folder: Path, giver: Path, agent: int) -> NoReturn:
    for number in itertools.count():
        job, out = folder / f"{number}.job", folder / f"{number}-rank{dist.get_rank()}.pt"
        while not job.exists():
            if not giver.exists() or os.getppid() != agent:
                os._exit(1)
            time.sleep(0.02)
        leaves = False
        try:
            run, arguments = pickle.loads(job.read_bytes())
            found = run(*arguments)
            dist.barrier()
            world.clear()  # the groups of this job would take CPU time from the next ones
            leaves = len(os.listdir("/proc/self/task")) > THREADS
        except Leave as leave:
            found, leaves = leave.found, True
        except BaseException:
            out.with_suffix(".error").write_text(traceback.format_exc())
            os._exit(1)
        torch.save(found, out.with_suffix(".part"))
        if leaves:
            out.with_suffix(".left").touch()
        out.with_suffix(".part").rename(out)
        if leaves:
            os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        _be_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
