"""Provides reward functions that misbehave on request. Verifier workers import them, tests never do.

A completion "<fault> <path>" makes `misbehave` write the witness file at <path> and then commit the fault.
"""

import asyncio
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def good(completion):
    return 1.0


def misbehave(completion):
    fault, _, witness = completion.partition(" ")
    if fault == "healthy":
        return 1.0
    Path(witness).write_text(f"{os.getpid()}")
    return FAULTS[fault]()


def _raise():
    raise KeyError("planted")


def _exit():
    sys.exit(0)


class _Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


def _unprintable():
    raise _Unprintable


def _loop():
    while True:
        pass


def _c_sleep():
    # PyDLL keeps the interpreter lock: no Python code of this process runs any more.
    ctypes.PyDLL(None).sleep(1000)


def _nap():
    time.sleep(0.2)
    return 1.0


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


def _segfault():
    ctypes.string_at(0)


def _hoard():
    return float(len(bytearray(1 << 40)))


def _flood():
    while True:
        os.write(1, b"x" * 65536)


def _chatter():
    print("chatter " * 100_000)
    return 1.0


def _fork_and_hang():
    for _ in range(5):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)


def _fork_and_return():
    os.fork()
    return 1.0


def _big_file():
    with open("/dev/null", "rb"), open(os.environ.get("TMPDIR", "/tmp") + f"/big-{os.getpid()}", "wb") as file:
        os.unlink(file.name)
        for _ in range(100):
            file.write(bytes(1 << 20))
    return 1.0


def _close_descriptors():
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # the socket's number is that of the pool's process, so it may be large
    return 1.0


def _late_death():
    threading.Timer(0.05, os._exit, (9,)).start()
    return 1.0


def _leave_child():
    subprocess.Popen(["sleep", "1000"])
    return 1.0


FAULTS = {
    "raise": _raise,
    "exit": _exit,
    "unprintable": _unprintable,
    "loop": _loop,
    "c_sleep": _c_sleep,
    "nap": _nap,
    "stop": _stop,
    "os_exit": lambda: os._exit(0),
    "segfault": _segfault,
    "abort": os.abort,
    "hoard": _hoard,
    "flood": _flood,
    "chatter": _chatter,
    "fork_and_hang": _fork_and_hang,
    "fork_and_return": _fork_and_return,
    "big_file": _big_file,
    "close_descriptors": _close_descriptors,
    "late_death": _late_death,
    "leave_child": _leave_child,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "inf": lambda: float("-inf"),
    "str": lambda: "1.0",
    "bool": lambda: True,
    "complex": lambda: 1j,
    "huge": lambda: 10**400,
    "astronomic": lambda: 1e308,
}


def environment(completion):
    """Return 1 if this process is set up as a verifier should be."""
    told = [name for name in os.environ if name.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_", "SECRET_", "TORCH"))]
    assert not told, told
    assert os.getsid(0) == os.getpid()
    assert sys.stdin.read() == ""
    return 1.0


def nosy(completion):
    """Return 1 if the hidden answer is nowhere in this process. The code spells it reversed, to not find itself."""
    found = _search(("hidden" + completion.removeprefix("question"))[::-1])
    assert not found, found
    return 1.0


def nosy_with_answer(completion, answer):
    """Control for `nosy`: the same search, in a process that was given the answer, must find it."""
    found = _search(answer[::-1])
    assert found
    return 1.0


def _search(reversed_secret):
    """Search for the secret in the frames above the reward function and in everything the garbage collector knows."""
    places = []
    frame = sys._getframe(2)
    while frame is not None:
        places += [(f"{frame.f_code.co_name}.{name}", value) for name, value in frame.f_locals.items()]
        places += [(f"global {name}", value) for name, value in frame.f_globals.items()]
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, dict):
            places += [("dict", value) for value in list(thing.values())]
        elif isinstance(thing, list | tuple | set):
            places += [(type(thing).__name__, value) for value in list(thing)]
    calls = [thing for _, thing in places if type(thing).__name__ == "Call"]  # which the collector may not track
    places += [("Call", row) for call in calls for row in call.rows]
    return [
        place
        for place, value in places
        if (isinstance(value, str) and value[::-1] == reversed_secret)
        or (isinstance(value, bytes | bytearray) and reversed_secret.encode() in value[::-1])
    ]


def how_it_ended(finish_reason, stop_token_id):
    return {"stop": stop_token_id, "length": -1}[finish_reason]


def all_arguments(prompt, completion, answer):
    return float((prompt, completion, answer) == ("the prompt", "the completion", "the answer"))


def optional(completion, scale=2.0, *args, **kwargs):
    return scale + len(args) + len(kwargs)


def all_columns(completion, **columns):
    return float(len(json.dumps(columns, sort_keys=True)))


def batch_all_columns(completion, **columns):
    rows = [{name: values[at] for name, values in columns.items()} for at in range(len(completion))]
    return [all_columns("", **row) for row in rows]


def no_arguments():
    return 0.25


def needs_solution(completion, solution):
    return float(completion == solution)


def positional(completion, /):
    return 1.0


async def patient(completion):
    await asyncio.sleep(0.01)
    return misbehave(completion)


_kept = []


def keeps_memory(completion):
    """Return 1 until the third call, for which there is no memory."""
    _kept.append(bytes(3 << 29))
    return 1.0


_loops = set()


async def same_loop(completion):
    """Return how many event loops this function has seen."""
    _loops.add(id(asyncio.get_running_loop()))
    return float(len(_loops))


def batch_sizes(completion, scale=None):
    """Return the size of the batch for each of its items; a batch with a completion "<fault>" commits it."""
    for one in completion:
        misbehave(one)
    return [float(len(completion)) if scale is None else float(one) for one in scale or completion]


async def batch_with_bad_items(completion):
    """Return 1 for each item but those named in ITEM_FAULTS."""
    await asyncio.sleep(0)
    return [ITEM_FAULTS.get(one, 1.0) for one in completion]


ITEM_FAULTS = {
    "error": ValueError("planted"),
    "memory": MemoryError("planted"),
    "none": None,
    "nan": float("nan"),
    "str": "1.0",
    "huge": 10**400,
}


def batch_answers(completion):
    """Return what the first completion says instead of a list of numbers."""
    return {"short": [1.0], "number": 1.0, "text": "11", "none": None, "long": [1.0] * 9}[completion[0]]


def batch_rows(completion, answer, completion_token_ids, messages):
    return [float(len(a) + sum(t) + len(m)) for a, t, m in zip(answer, completion_token_ids, messages, strict=True)]


def everything(
    prompt, completion, completion_token_ids, finish_reason, stop_token_id, stop_string, messages, tests, big
):
    got = (prompt, completion, completion_token_ids, finish_reason, stop_token_id, messages, tests, big)
    assert stop_string == "##"
    wanted = ("p", "c", [5, 6], "stop", 7, [{"role": "user", "content": "p"}], [{"in": [1, None]}, 0.1], 10**30)
    assert got == wanted, got
    return 1.0


not_callable = 3
