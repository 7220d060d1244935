"""Simulates hosts on one machine: each has its own network, host name, processes and /dev/shm, joined by a switch.

Hosts are Linux namespaces inside a user namespace, so root is not needed where user namespaces are allowed. They share
files, as the nodes of a cluster do through a shared filesystem.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_rl.errors import ConfigError, describe

INTERFACE = "eth0"
_INSIDE = "MOE_RL_TWO_HOSTS"
_TOOLS = ("unshare", "nsenter", "ip", "mount", "hostname")


def enter(command: Sequence[str]) -> None:
    """Replace this process by the same command in a namespace that can make hosts. Does nothing if it already runs
    there.

    Raises:
        ConfigError: the system does not allow user namespaces.
    """
    if os.environ.get(_INSIDE):
        return
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise ConfigError(describe("Hosts cannot be made here", got=f"no {', '.join(missing)}", do="install iproute2"))
    namespaces = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc"]
    tried = subprocess.run([*namespaces, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode:
        raise ConfigError(
            describe(
                "Hosts cannot be made here: user namespaces are not allowed",
                got=tried.stderr.strip(),
                do="allow them (sysctl kernel.unprivileged_userns_clone=1), or run on a machine that does",
            )
        )
    os.environ[_INSIDE] = "1"
    os.execvp("unshare", [*namespaces, "--kill-child", sys.executable, *command])


class Host:
    """Represents a simulated host.

    names: a file that replaces /etc/hosts in the host. kill() acts like a power cut: it ends all processes at once.
    """

    def __init__(self, name: str, address: str, names: Path):
        self.name, self.address = name, address
        steps = [f"hostname {name}", f"mount --bind {shlex.quote(str(names))} /etc/hosts"]
        steps += ["mount -t tmpfs tmpfs /dev/shm", "ip link set lo up", "echo up"]
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child",
             "sh", "-c", " && ".join([*steps, "exec sleep infinity"])],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        if self._holder.stdout.readline() != "up\n":
            raise ConfigError(describe("A host could not be made", where=name, got="its namespaces were refused"))
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self._first = int(children.read_text().split()[0])

    def plug_in(self, end: str) -> None:
        """Move this end of a cable into the host, as its interface."""
        _run("ip", "link", "set", end, "netns", str(self._first))
        self.run("ip", "link", "set", end, "name", INTERFACE)
        self.run("ip", "address", "add", f"{self.address}/24", "dev", INTERFACE)
        self.run("ip", "link", "set", INTERFACE, "up")

    def run(self, *command: str) -> None:
        _run(*self._enter(), *command)

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path) -> subprocess.Popen:
        with log.open("ab") as out:
            return subprocess.Popen(
                [*self._enter(), "env", f"--chdir={cwd}", *command], stdout=out, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env=dict(environment),
            )  # fmt: skip

    def kill(self) -> None:
        if self._holder.poll() is None:
            os.kill(self._first, signal.SIGKILL)
            self._holder.wait()

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self._first), "--net", "--uts", "--mount", "--ipc", "--pid", "--"]


def connect(hosts: Sequence[Host]) -> None:
    """Join the hosts by a switch. It stays when a host is gone, and a new host can take its place."""
    subprocess.run(["ip", "link", "delete", "switch"], capture_output=True)
    _run("ip", "link", "add", "switch", "type", "bridge")
    _run("ip", "link", "set", "switch", "up")
    for number, host in enumerate(hosts):
        subprocess.run(["ip", "link", "delete", f"port{number}"], capture_output=True)  # of a host that has just ended
        _run("ip", "link", "add", f"end{number}", "type", "veth", "peer", "name", f"port{number}")
        _run("ip", "link", "set", f"port{number}", "master", "switch", "up")
        host.plug_in(f"end{number}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ConfigError(
            describe("A host could not be made", where={"command": " ".join(command)}, got=done.stderr.strip())
        )


def wait_for(condition, seconds: float, what: str, processes: Sequence[subprocess.Popen] = ()):
    """Return the first true value of condition(). Raises ConfigError after a timeout, or if one of the processes
    ends.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        ended = [process for process in processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            got = f"a process that ended with {ended[0].returncode}" if ended else f"nothing in {seconds:g} s"
            raise ConfigError(describe(f"Waited in vain for {what}", got=got))
        time.sleep(0.1)
    return value
