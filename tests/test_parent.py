"""What a process has started ends with it, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# It starts one process of its own session, which starts another one, and says which.
STARTS = """
import subprocess, sys
from moe_rl.parent import take_along
take_along()
inner = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", inner], start_new_session=True, stdin=subprocess.PIPE)
print(child.pid, flush=True)
sys.stdin.read()
"""

# Its child shares memory, which Python's resource tracker removes when the child is gone.
SHARES = """
import subprocess, sys
from moe_rl.parent import take_along
take_along()
inner = (
    "from multiprocessing.shared_memory import SharedMemory; import time; memory = SharedMemory(create=True, size=9); "
    "print(memory.name, flush=True); time.sleep(600)"
)
subprocess.Popen([sys.executable, "-c", inner], start_new_session=True, stdin=subprocess.PIPE)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_the_one_that_took_it_along(number):
    process = subprocess.Popen([sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    started = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    assert all(one.is_running() for one in started)
    os.kill(process.pid, number)
    process.wait()
    _, left = psutil.wait_procs(started, timeout=60)
    assert [one for one in left if one.status() != psutil.STATUS_ZOMBIE] == []


def test_shared_memory_of_a_killed_child_is_removed():
    process = subprocess.Popen([sys.executable, "-c", SHARES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    memory = Path("/dev/shm", process.stdout.readline().strip())
    started, until = list[psutil.Process](), time.monotonic() + 60
    while not any("resource_tracker" in " ".join(one.cmdline()) for one in started):  # it may not have begun yet
        assert memory.is_file() and time.monotonic() < until
        started = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    psutil.wait_procs(started, timeout=60)
    left = memory.exists()
    memory.unlink(missing_ok=True)
    assert not left
