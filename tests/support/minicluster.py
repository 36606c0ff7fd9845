"""Several nodes on one Linux machine, joined by a slow link: for tests and benchmarks.

A node is a set of namespaces: a host name, /dev/shm and /etc/hosts, System V memory and a network
of its own, with an address on a link of any rate and delay (virtual_switch.py).  The file
system is shared.  It needs root and /dev/net/tun.  Standard library only::

    with Cluster(nodes=2, rate=1e9, delay=100e-6) as cluster:
        cluster.mpiexec(4, "-m", "mpidist", "info")

Nothing outlives it: namespaces vanish with their last process, and every process in them is ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import processes

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)
SPACES = ("--uts", "--mount", "--ipc", "--net")
PATIENCE = 30.0  # seconds to set a node up
# What is started in place of ssh: agent [-options] HOST COMMAND…
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
exec nsenter -t $(cat {folder}/$host.pid) {spaces} --wd="$PWD" sh -c "$*"
"""
NODE = """hostname {name} && mount --bind {folder}/hosts /etc/hosts &&
mount -t tmpfs -o size=2g tmpfs /dev/shm && ip link set lo up && echo ok && exec sleep 86400"""


class Refused(RuntimeError):
    """This machine does not permit what a cluster needs."""


class Cluster:
    """Nodes "n1", "n2", … and a "head" from which programs are started.

    Parameters
    ----------
    nodes : int
        How many.
    rate : float
        Bits a second, of each node's link in each direction.
    delay : float
        Seconds that a packet is under way.
    """

    def __init__(self, nodes: int = 2, rate: float = 1e9, delay: float = 100e-6):
        self.names = [f"n{k}" for k in range(1, nodes + 1)]
        self.rate, self.delay = rate, delay
        self.pids: dict[str, int] = {}
        self._children: list[subprocess.Popen] = []
        self._spaces: set[str] = set()
        self.folder = ""

    def __enter__(self) -> Cluster:
        self.folder = tempfile.mkdtemp(prefix="cluster.")  # short: it holds names of sockets
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- starting and ending --------------------------------------------------------------------

    def _start(self) -> None:
        if os.geteuid() or not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount"))):
            raise Refused("needs root, util-linux and iproute2")
        addresses = {name: f"10.77.0.{k}" for k, name in enumerate(["head", *self.names], 1)}
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        self._write("hosts", f"127.0.0.1 localhost\n{hosts}")
        self._write("agent", AGENT.format(folder=self.folder, spaces=" ".join(SPACES)))
        os.chmod(f"{self.folder}/agent", 0o755)
        holders = {name: self._hold(name) for name in addresses}
        for name, holder in holders.items():
            self._expect_ok(holder, f"namespaces of {name}")
            self.pids[name] = holder.pid
            self._spaces.add(os.readlink(f"/proc/{holder.pid}/ns/uts"))
            self._write(f"{name}.pid", str(holder.pid))
        ends = [f"{self.pids[name]}={address}" for name, address in addresses.items()]
        program = str(Path(__file__).with_name("virtual_switch.py"))
        switch = self._spawn([sys.executable, program, str(self.rate), str(self.delay), *ends])
        self._expect_ok(switch, "a TUN device")

    def _write(self, name: str, text: str) -> None:
        Path(self.folder, name).write_text(text, encoding="utf-8")

    def _hold(self, name: str) -> subprocess.Popen:
        """Start the process that keeps the namespaces of a node."""
        script = NODE.format(name=name, folder=self.folder)
        return self._spawn(["unshare", *SPACES, "sh", "-c", script])

    def _spawn(self, command: list[str]) -> subprocess.Popen:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )
        self._children.append(child)
        return child

    def _expect_ok(self, child: subprocess.Popen, what: str) -> None:
        ready, _, _ = select.select([child.stdout], (), (), PATIENCE)
        if not ready or child.stdout.readline() != "ok\n":
            child.kill()
            reason = child.communicate()[1].strip().splitlines() or ["no answer"]
            raise Refused(f"cannot make {what}: {reason[-1]}")

    def stop(self) -> None:
        """End every process of the cluster."""
        deadline = time.monotonic() + PATIENCE
        while (left := self._inhabitants()) and time.monotonic() < deadline:
            kill(left)
            for child in self._children:
                child.poll()
        for child in self._children:
            child.kill()
            child.communicate()
        self._children.clear()
        self.pids.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def left_behind(self, limit: float = PATIENCE) -> list[str]:
        """List what runs on the nodes though nothing should any more; waits for its end."""
        deadline = time.monotonic() + limit
        while True:
            found = [pid for pid in self._inhabitants() if pid not in self._own()]
            if not found or time.monotonic() > deadline:
                return [text for pid in found if (text := words_of(pid))]
            time.sleep(0.05)

    def _own(self) -> set[int]:
        """Give the processes that make up the cluster itself."""
        return {child.pid for child in self._children}

    def _inhabitants(self, spaces: set[str] | None = None) -> list[int]:
        """List the processes that live in some of our namespaces, by default all."""
        spaces, found = self._spaces if spaces is None else spaces, []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.readlink(f"/proc/{entry}/ns/uts") in spaces:
                    found.append(int(entry))
            except OSError:
                pass  # it has ended
        return [pid for pid in found if pid != os.getpid()]

    # -- use ------------------------------------------------------------------------------------

    def mpiexec(
        self,
        ranks: int,
        *program: str,
        python: str = sys.executable,
        limit: float = 60.0,
        **env: str,
    ) -> processes.Finished:
        """Run a Python program on `ranks` ranks, as many on each node, with the MPI of `python`."""
        each = -(-ranks // len(self.names))
        hosts = ",".join(f"{name}:{each}" for name in self.names)
        launcher = Path(python).parent / "mpiexec"
        option = "--host" if is_open_mpi(python) else "-hosts"
        command = [str(launcher), "-n", str(ranks), option, hosts, python, *program]
        return self.run(*command, limit=limit, **env)

    def run(self, *command: str, node: str = "head", limit: float = 60.0, **env: str):
        """Run a program on a node, with a time limit."""
        return processes.run(self.inside(node, *command), limit, self.environment(**env))

    def inside(self, node: str, *command: str) -> list[str]:
        """Give the command that runs another one on a node."""
        pid = str(self.pids[node])
        return ["nsenter", "-t", pid, *SPACES, f"--wd={os.getcwd()}", *command]

    def crash(self, node: str, first: str = "") -> None:
        """Let a node lose its power: every process on it is killed.

        One after the other, so what is left still tells of the others' ends: those with `first` in
        their commands are gone before the next.
        """
        space = os.readlink(f"/proc/{self.pids[node]}/ns/uts")
        deadline = time.monotonic() + PATIENCE
        for word in (first, ""):
            while left := [
                pid
                for pid in self._inhabitants({space})
                if pid != self.pids[node] and word in words_of(pid)
            ]:
                kill(left)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"processes {left} on {node} do not die")

    def cut_off(self, node: str) -> None:
        """Let no program be started on a node any more."""
        Path(self.folder, f"{node}.pid").unlink()

    def environment(self, **env: str) -> dict[str, str]:
        """Give the environment in which both MPI libraries use the nodes and the link."""
        agent = f"{self.folder}/agent"
        mine = processes.environment(
            TMPDIR=self.folder,
            OMPI_MCA_btl_tcp_if_include="eth0",
            PRTE_MCA_prte_if_include="eth0",
            PRTE_MCA_plm_ssh_agent=agent,
            UCX_NET_DEVICES="eth0",
            HYDRA_IFACE="eth0",
            HYDRA_LAUNCHER="ssh",
            HYDRA_LAUNCHER_EXEC=agent,
            **env,
        )
        mine.pop("PRTE_MCA_rmaps_default_mapping_policy", None)  # else all ranks are on one node
        return mine


def words_of(pid: int) -> str:
    """Give the command of a process, empty if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
    return words and f"{pid}: {words}"


def kill(pids: list[int]) -> None:
    """Kill processes that may have ended already."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def is_open_mpi(python: str) -> bool:
    """Tell whether the MPI beside a Python is Open MPI."""
    return (Path(python).parent / "ompi_info").exists()


@contextmanager
def running(cluster) -> Iterator:
    """Start a cluster for tests, which skip where it cannot be; nothing of it may be left."""
    import pytest  # not needed by benchmarks/slow_link.py

    try:
        cluster.__enter__()
    except Refused as why:
        pytest.skip(f"needs network namespaces and a TUN device: {why}")
    yield cluster
    left = cluster.left_behind()
    cluster.stop()
    assert not left, "\n".join(left)
