"""One rank of a world that does jobs: see ranks.py, which starts it.

    torchrun --nproc-per-node N worker.py FOLDER PID

Job n is the file FOLDER/<n>.job: a pickled function and its arguments. Rank r writes what the function returns to
FOLDER/<n>-rank<r>.pt, or its traceback to FOLDER/<n>-rank<r>.error, and then ends. A rank that takes no further job
makes FOLDER/<n>-rank<r>.left. A job lays out its own parallel groups.

PID: of the process that gives the jobs; without it the rank ends.
"""

import itertools
import os
import pickle
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from moe_rl.megatron import world
from tests.distributed.ranks import Leave

# Jobs leave threads of gloo behind: a few each, and each takes processor time.
THREADS = 80


def main():
    folder, giver, agent = Path(sys.argv[1]), Path("/proc") / sys.argv[2], os.getppid()
    world.join(timeout_seconds=300)
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
    main()
