"""The connections from the ranks to ``mpidist run``, on which each reports its state."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import secrets
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import LaunchError
from ..foreign import read_json


def signal_name(number: int) -> str:
    """Return a signal as text, ``9 (SIGKILL)``; real-time signals have no name."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return f"{number}"


_SIOCGIFADDR = 0x8915
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface, or an empty string if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def addresses() -> list[str]:
    """Return the addresses at which other hosts reach this one, IPv4 first."""
    found = [address_of(name) for _, name in socket.if_nameindex() if name != "lo"]
    return [address for address in found if address] + addresses_v6()


def addresses_v6(table: Path = Path("/proc/net/if_inet6")) -> list[str]:
    """Return the IPv6 addresses of this host with global scope."""
    lines = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
        for number, _, _, scope, _, name in lines
        if scope == "00" and name != "lo"
    ]


def interface_to(host: str) -> str:
    """Return the name of the network interface for messages to `host`; empty if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect((host, 9))  # sends nothing: the kernel chooses the route
            own = any_socket.getsockname()[0]
    except OSError:
        return ""
    return next((n for _, n in socket.if_nameindex() if address_of(n) == own), "")


def describe(interface: str) -> str:
    """Return a network interface as text, with its address and, if known, its speed."""
    speed = ""
    try:
        megabits = int((_NET / interface / "speed").read_text())
        speed = f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""
    except (OSError, ValueError):
        pass  # a virtual interface has no speed
    return f"{interface} {address_of(interface)}{speed}".strip()


def adapters() -> list[str]:
    """Return the InfiniBand and similar adapters of this host as text, with their rates."""
    found = []
    for name in sorted(os.listdir(_INFINIBAND)) if _INFINIBAND.is_dir() else ():
        try:
            rate = (_INFINIBAND / name / "ports" / "1" / "rate").read_text().strip()
        except OSError:
            rate = ""
        found.append(f"{name} {rate}".strip())
    return found


SECRET = "MPIDIST_RUN_SECRET"  # in no command line: known to this job only
MAX_LINE = 1 << 16  # bytes of a report
OTHER_FILES = 256  # open files of this process and the launcher, beside the connections
# What somebody may do who has connected, and has not shown the secret.
UNKNOWN_BYTES, UNKNOWN_SECONDS, UNKNOWN_AT_MOST = 1000, 10.0, 64
LOST = "lost"


@dataclass
class RankState:
    """The last known state of a rank: its host, whether MPI has started, and its exit status.

    Attributes
    ----------
    number : int
        The rank.
    host : str
        Its host.
    status : int, "lost" or None
        Its exit status, negative for a signal; None before its end.  Of a lost rank it is `left`,
        or "lost" if that is 0.
    mpi : str
        "starting" or "started"; empty before ``MPI_Init``.
    left : int
        Exit code that a Python program has reported before its process ends; 0 before that.
    lost : bool
        Whether its connection ended before its exit status came.
    """

    number: int
    host: str
    status: int | str | None = None
    mpi: str = ""
    left: int = 0
    lost: bool = False

    @property
    def succeeded(self) -> bool:
        """Whether the rank ended with exit code 0."""
        return self.status == 0

    @property
    def code(self) -> int:
        """The exit code of a rank that has ended; 128 + N for signal N, 1 for a lost rank."""
        if not isinstance(self.status, int):
            return 1
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        how = f"ended with exit code {self.status}"
        if self.status == LOST:
            how = (
                "is lost, and so is the process that monitored it: killed by the launcher because "
                "another rank failed, killed by hand, or its node is down"
            )
        elif isinstance(self.status, int) and self.status < 0:
            how = f"was killed by signal {signal_name(-self.status)}"
        return f"rank {self.number} on {self.host} {how}"


@dataclass
class Connection:
    """A connection from the monitor of one rank (rank_process.py).

    `text` is the part of the next report that has arrived; `rank` is None before the first one;
    `since` is the time of the connection.
    """

    socket: socket.socket
    text: bytes = b""
    rank: RankState | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass
class Report:
    """A report of a rank's monitor: any of its facts, see rank_process.py."""

    secret: str = ""
    rank: int = -1
    host: str = ""
    mpi: str | None = None
    failure: dict[str, str] | None = None
    exit: int | None = None
    status: int | None = None


@dataclass
class Connections:
    """The connections of all ranks: receives their reports, and sends them signals.

    Parameters
    ----------
    ranks : int
        Number of ranks of the job.
    ended : callable
        ``ended(state)`` is called at the end of each rank.
    failed : callable
        ``failed(rank, host, description)`` is called with an exception that ends a rank; the
        description has "kind", "line" and "text": see :class:`~mpidist.launcher.failures.Failure`.
    local : bool
        Whether all ranks are on this machine: others then cannot connect.
    known : dict of int to RankState
        The ranks that have connected.
    """

    ranks: int
    ended: Callable[[RankState], None]
    failed: Callable[[int, str, dict[str, str]], None]
    local: bool = False
    known: dict[int, RankState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_file_limit(self.ranks)
        self.secret = secrets.token_hex(16)
        self._key = self.secret.encode()
        self.last_mpi_report = time.monotonic()
        self._connections: list[Connection] = []
        self._sent: list[int] = []  # signals; ranks that connect later get them too
        self._selector = selectors.DefaultSelector()
        self._listener = open_listener(self.local)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def address(self) -> str:
        """Name, addresses and port at which ranks reach this process: ``HOST,ADDRESS,…/PORT``."""
        names = [LOOPBACK] if self.local else [socket.gethostname(), *addresses()]
        hosts = dict.fromkeys(names)
        return f"{','.join(hosts)}/{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.socket.close()
        self._listener.close()
        self._selector.close()

    def send(self, number: int) -> None:
        """Send a signal to the program of every rank, also of ranks that connect later."""
        self._sent.append(number)
        for connection in self._connections:
            if connection.rank is not None:
                _send(connection, number)

    def listen(self, seconds: float) -> None:
        """Receive reports of the ranks, for at most `seconds`."""
        ready = [key.data for key, _ in self._selector.select(seconds)]
        for connection in filter(None, ready):
            self._read(connection)
        if None in ready:
            self._accept()
        until = time.monotonic() - UNKNOWN_SECONDS
        for connection in [c for c in self._connections if c.rank is None and c.since < until]:
            self._drop(connection)

    def _accept(self) -> None:
        """Accept a connection; the oldest unknown ones make room for it."""
        unknown = [c for c in self._connections if c.rank is None]
        full = len(self._connections) >= self.ranks + UNKNOWN_AT_MOST
        try:
            accepted, _ = self._listener.accept()
            for option, value in (("IDLE", 5), ("INTVL", 5), ("CNT", 3)):
                accepted.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError:  # it is gone already, or there are too many open files
            full = True
        else:
            connection = Connection(accepted)
            self._connections.append(connection)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        if full and unknown:
            self._drop(unknown[0])

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(65536)
        except OSError:
            data = b""
        *texts, connection.text = (connection.text + data).split(b"\n")
        good = bool(data) and all(self._take(connection, text) for text in texts)
        if not good or len(connection.text) > self._limit(connection):
            self._drop(connection)

    def _limit(self, connection: Connection) -> int:
        return UNKNOWN_BYTES if connection.rank is None else MAX_LINE

    def _take(self, connection: Connection, text: bytes) -> bool:
        """Handle the text of a report; return False if its sender is unknown and stays so."""
        with suppress(ValueError, KeyError):  # no report
            report = read_json(text, "a report", Report, longest=self._limit(connection))
            self._handle(connection, report)
        return connection.rank is not None

    def _drop(self, connection: Connection) -> None:
        """Close a connection; a rank whose end has not been reported is lost."""
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.remove(connection)
        if connection.rank is not None and connection.rank.status is None:
            connection.rank.lost = True
            self._end(connection.rank, connection.rank.left or LOST)

    def _handle(self, connection: Connection, report: Report) -> None:
        """Handle a report of a rank.

        The first has the rank, its host, and the job's secret, which shows that it is one of this
        job.  A later one has the state of MPI, an exception, the exit code that a Python program
        announces before its end ("exit"), or the status with which the program ended ("status").
        """
        if connection.rank is None:
            right = secrets.compare_digest(report.secret.encode("utf-8", "replace"), self._key)
            if not right or not 0 <= report.rank < self.ranks:
                raise ValueError("the first report has a wrong secret: not a process of this job")
            rank = RankState(report.rank, report.host)
            connection.rank = self.known[rank.number] = rank
            for number in self._sent:
                _send(connection, number)
        elif report.mpi is not None:
            connection.rank.mpi, self.last_mpi_report = report.mpi, time.monotonic()
        elif report.failure is not None:
            self.failed(connection.rank.number, connection.rank.host, report.failure)
        elif report.exit is not None:
            connection.rank.left = report.exit
        elif report.status is not None:
            self._end(connection.rank, report.status)

    def _end(self, rank: RankState, status: int | str) -> None:
        rank.status = status
        if not rank.mpi:  # it will not enter MPI_Init any more
            self.last_mpi_report = time.monotonic()
        self.ended(rank)


def _send(connection: Connection, number: int) -> None:
    try:
        connection.socket.sendall(json.dumps({"signal": int(number)}).encode() + b"\n")
    except OSError:
        pass  # the rank has ended


LOOPBACK = "127.0.0.1"


def open_listener(local: bool = False) -> socket.socket:
    """Return a listening socket for IPv4 and, if the kernel has it, IPv6.

    With `local`, only processes of this machine can connect to it.
    """
    if local:
        return socket.create_server((LOOPBACK, 0), backlog=4096)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
        except OSError:
            pass  # the kernel has IPv6, but this host has no address
    return socket.create_server(("", 0), backlog=4096)


def raise_file_limit(ranks: int) -> None:
    """Raise the limit of open files, if too low for `ranks` connections; LaunchError if refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ranks + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise LaunchError(
                f"monitoring {ranks} ranks needs {needed} open files: the limit is {hard} "
                "(ulimit -Hn); start without monitoring (--no-watch)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
