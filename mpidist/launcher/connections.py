"""The lines from the ranks to ``mpidist run``: each tells who it is, and how its program ended."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LaunchError


def signal_name(number: int) -> str:
    """Give ``9 (SIGKILL)``; real-time signals have no name."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return f"{number}"


_SIOCGIFADDR = 0x8915
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


def address_of(interface: str) -> str:
    """Give the IPv4 address of an interface, or an empty string."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def addresses() -> list[str]:
    """List the addresses by which other hosts may reach this one, those of IPv4 first."""
    found = [address_of(name) for _, name in socket.if_nameindex() if name != "lo"]
    return [address for address in found if address] + addresses_v6()


def addresses_v6(table: Path = Path("/proc/net/if_inet6")) -> list[str]:
    """List the IPv6 addresses that are good beyond the link that they are on."""
    lines = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
        for number, _, _, scope, _, name in lines
        if scope == "00" and name != "lo"
    ]


def interface_to(host: str) -> str:
    """Return the interface by which messages to `host` leave; an empty string if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect((host, 9))  # sends nothing: the kernel chooses the way
            own = any_socket.getsockname()[0]
    except OSError:
        return ""
    return next((n for _, n in socket.if_nameindex() if address_of(n) == own), "")


def describe(interface: str) -> str:
    """Give an interface with its address, and its speed where the driver knows it."""
    speed = ""
    try:
        megabits = int((_NET / interface / "speed").read_text())
        speed = f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""
    except (OSError, ValueError):
        pass  # a virtual one
    return f"{interface} {address_of(interface)}{speed}".strip()


def adapters() -> list[str]:
    """List InfiniBand and like adapters, with the rate of their first port."""
    found = []
    for name in sorted(os.listdir(_INFINIBAND)) if _INFINIBAND.is_dir() else ():
        try:
            rate = (_INFINIBAND / name / "ports" / "1" / "rate").read_text().strip()
        except OSError:
            rate = ""
        found.append(f"{name} {rate}".strip())
    return found


WORD = "MPIDIST_RUN_WORD"  # which only the processes of this run know; not in a list of processes
LONGEST = 1 << 16  # bytes of a line that a member says
OTHER_FILES = 256  # that this process and the launcher may open
LOST = "lost"


@dataclass
class Rank:
    """What is known of a rank: where it runs, and its status once it has ended."""

    number: int
    host: str
    status: int | str | None = None
    mpi: str = ""  # "starting" or "started", as far as the program says

    @property
    def good(self) -> bool:
        """Whether it finished well."""
        return self.status == 0

    @property
    def code(self) -> int:
        """The exit code that its end stands for."""
        if not isinstance(self.status, int):
            return 1
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        how = f"ended with exit code {self.status}"
        if self.status == LOST:
            how = (
                "is lost: the launcher ended it with the process beside it, as it does when "
                "another rank fails, or somebody killed both, or its node is gone"
            )
        elif isinstance(self.status, int) and self.status < 0:
            how = f"was ended by signal {signal_name(-self.status)}"
        return f"rank {self.number} on {self.host} {how}"


@dataclass
class Line:
    """The connection of a rank."""

    socket: socket.socket
    text: bytes = b""
    rank: Rank | None = None


@dataclass
class Lines:
    """Listens to the ranks.

    Parameters
    ----------
    ranks : int
        How many there are to be.
    ended : callable
        Called with a rank that has ended, as its status says.
    """

    ranks: int
    ended: Callable[[Rank], None]
    known: dict[int, Rank] = field(default_factory=dict)

    def __post_init__(self) -> None:
        enough_files(self.ranks)
        self.word = secrets.token_hex(8)
        self.noted = time.monotonic()  # when a rank last said something of its MPI
        self._lines: list[Line] = []
        self._sent: list[int] = []  # signals, for those that come later too
        self._selector = selectors.DefaultSelector()
        self._door = open_door()
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ)

    @property
    def where(self) -> str:
        """``HOST,HOST,…/PORT``: names and addresses by which this process can be reached."""
        hosts = dict.fromkeys([socket.gethostname(), *addresses()])
        return f"{','.join(hosts)}/{self._door.getsockname()[1]}"

    def close(self) -> None:
        """Listen to nobody any more."""
        for line in self._lines:
            line.socket.close()
        self._door.close()
        self._selector.close()

    def send(self, number: int) -> None:
        """Send a signal to the program of every rank; those that are yet to come get it then."""
        self._sent.append(number)
        for line in self._lines:
            if line.rank is not None:
                _say(line, number)

    def listen(self, seconds: float) -> None:
        """Hear what the ranks say, for at most so long."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def _accept(self) -> None:
        connection, _ = self._door.accept()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("IDLE", 5), ("INTVL", 5), ("CNT", 3)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_KEEP{option}"), value)
        line = Line(connection)
        self._lines.append(line)
        self._selector.register(connection, selectors.EVENT_READ, line)

    def _read(self, line: Line) -> None:
        try:
            data = line.socket.recv(65536)
        except OSError:
            data = b""
        *texts, line.text = (line.text + data).split(b"\n")
        try:
            for text in texts:
                self._hear(line, json.loads(text))
            if len(line.text) > LONGEST:
                raise ValueError("no line of a member is so long")
        except (ValueError, KeyError, TypeError, AttributeError):
            data = b""  # whoever it is, a port scan perhaps: it is not listened to
        if not data:
            self._selector.unregister(line.socket)
            line.socket.close()
            self._lines.remove(line)
            if line.rank is not None and line.rank.status is None:
                self._end(line.rank, LOST)

    def _hear(self, line: Line, said: dict[str, Any]) -> None:
        if line.rank is None:
            if said.get("word") != self.word:
                raise ValueError("a process that does not belong to this run")
            line.rank = self.known[said["rank"]] = Rank(said["rank"], said["host"])
            for number in self._sent:
                _say(line, number)
        elif "mpi" in said:
            line.rank.mpi, self.noted = str(said["mpi"]), time.monotonic()
        elif "status" in said:
            self._end(line.rank, said["status"])

    def _end(self, rank: Rank, status: int | str) -> None:
        rank.status = status
        self.ended(rank)


def _say(line: Line, number: int) -> None:
    try:
        line.socket.sendall(json.dumps({"signal": int(number)}).encode() + b"\n")
    except OSError:
        pass  # it has ended


def open_door() -> socket.socket:
    """Give a socket that members reach by IPv4 and, where there is one, IPv6."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
        except OSError:
            pass  # the kernel has it, this host no address of it
    return socket.create_server(("", 0), backlog=4096)


def enough_files(ranks: int) -> None:
    """See to it that a connection of every rank can be open; raise LaunchError if it cannot."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ranks + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise LaunchError(
                f"mpidist run hears from each of {ranks} ranks, for which it needs {needed} open "
                f"files: allowed are {hard} (ulimit -Hn); --no-watch does without"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
