"""Provides environments that misbehave on request. Episodes import them, tests never do.

A row {"fault": ..., "witness": ...} makes `misbehave` write the witness file and then commit the fault.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


async def misbehave(session, row):
    if row["fault"] == "healthy":
        return 1.0
    Path(row["witness"]).write_text(f"{os.getpid()}")
    return await FAULTS[row["fault"]]()


async def _raise():
    raise KeyError("planted")


async def _exit():
    sys.exit(0)


async def _exit_in_a_task():
    async def leave():
        sys.exit(3)

    await asyncio.create_task(leave())


class _Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


async def _unprintable():
    raise _Unprintable


async def _own_timeout():
    async with asyncio.timeout(0.01):
        await asyncio.sleep(1000)


async def _os_exit():
    os._exit(0)


async def _abort():
    os.abort()


async def _hoard():
    return float(len(bytearray(1 << 40)))


async def _big_file():
    with open(os.environ.get("TMPDIR", "/tmp") + f"/big-{os.getpid()}", "wb") as file:
        os.unlink(file.name)
        os.truncate(file.fileno(), 2 << 30)
    return 1.0


async def _endless_await():
    await asyncio.Event().wait()


async def _will_not_stop():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)


async def _endless_loop():
    while True:
        pass


async def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0


async def _flood():
    while True:
        os.write(1, b"x" * 65536)


async def _fork_and_return():
    os.fork()
    return 1.0


async def _leave_children():
    """Leave children behind, some of them in groups and sessions of their own, and with children of their own."""
    for alone in (False, True):
        subprocess.Popen(["sleep", "100"], start_new_session=alone)
        shell = ["sh", "-c", "sleep 100 & echo; sleep 100"]
        subprocess.Popen(shell, start_new_session=alone, stdout=subprocess.PIPE).stdout.readline()  # its child runs
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(100)
        os._exit(0)
    return 1.0


async def _leave_children_and_die():
    await _leave_children()
    os._exit(1)


async def _leave_children_and_hang():
    await _leave_children()
    while True:
        pass


async def _leave_a_thread():
    threading.Thread(target=time.sleep, args=(1000,)).start()
    asyncio.create_task(_endless_await())
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 1000)
    return 1.0


def _returning(value):
    async def give():
        return value

    return give


FAULTS = {
    "raise": _raise,
    "exit": _exit,
    "exit_in_a_task": _exit_in_a_task,
    "unprintable": _unprintable,
    "own_timeout": _own_timeout,
    "os_exit": _os_exit,
    "abort": _abort,
    "hoard": _hoard,
    "big_file": _big_file,
    "endless_await": _endless_await,
    "will_not_stop": _will_not_stop,
    "endless_loop": _endless_loop,
    "stop": _stop,
    "flood": _flood,
    "fork_and_return": _fork_and_return,
    "leave_children": _leave_children,
    "leave_children_and_die": _leave_children_and_die,
    "leave_children_and_hang": _leave_children_and_hang,
    "leave_a_thread": _leave_a_thread,
    "none": _returning(None),
    "text": _returning("1.0"),
    "bool": _returning(True),
    "nan": _returning(float("nan")),
    "huge": _returning(10**400),
    "astronomic": _returning(1e308),
    "text_in_list": _returning([1.0, "x"]),
    "nan_in_list": _returning([1.0, float("nan")]),
    "tuple": _returning((1.0, 2.0)),
}


async def terminate(session, row):
    """Return the signal that ends a child which is asked to end."""
    with subprocess.Popen(["sleep", "100"]) as child:
        child.terminate()
        return -float(child.wait(5))


def plain(session, row):
    return 1.0


async def one_argument(session):
    return 1.0


async def facts(session, row):
    """Return 1 if this process and the session are as they should be."""
    told = [name for name in os.environ if name.startswith(("RANK", "WORLD_", "SECRET_"))]
    assert not told, told
    assert os.getsid(0) == os.getpid() and sys.stdin.read() == ""
    assert row == {"big": 10**30, "text": "\u20ac", "none": None, "list": [1, {"a": 0.1}]}
    assert (session.turns, session.tokens, session.seconds) == (5, 100, 20.0)
    return 1.0


async def cut_off(session, row):
    """Return whether the model's message was cut off."""
    reply = await session.ask([{"role": "user", "content": row["question"]}])
    assert reply.message == {"role": "assistant", "content": "ab"}
    return float(reply.finish_reason == "length")


async def chat(session, row):
    """Return a reward for each turn: the length of what the model said."""
    messages = [{"role": "user", "content": row["question"]}]
    rewards = []
    for _ in range(row["turns"]):
        messages += [await session.chat(messages, temperature=0), {"role": "user", "content": "more"}]
        rewards.append(len(messages[-2]["content"]))
    return rewards


async def forever(session, row):
    """Ask until something ends it."""
    Path(row["witness"]).write_text(f"{os.getpid()}")
    while True:
        await session.chat([{"role": "user", "content": "x"}])


not_callable = 3


async def sees(session, row):
    """Whether it has these options, and of the environment these variables and no secret."""
    variables = {name: os.environ.get(name) for name in row if name != "options"}
    return float(
        session.options == row["options"]
        and {"options": session.options, **variables} == row
        and "SECRET_TOKEN" not in os.environ
    )
