"""Reports of monitors: a connection from each rank to ``mpidist run``, on any host."""

from __future__ import annotations

import fcntl
import json
import resource
import secrets
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import LaunchError
from ..foreign import read_json
from .ranks import RankState, Report, Reports, Seen

_SIOCGIFADDR = 0x8915


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


SECRET = "MPIDIST_RUN_SECRET"  # in no command line: known to this job only
MAX_LINE = 1 << 16  # bytes of a report
OTHER_FILES = 256  # open files of this process and the launcher, beside the connections
# What somebody may do who has connected, and has not shown the secret.
UNKNOWN_BYTES, UNKNOWN_SECONDS, UNKNOWN_AT_MOST = 1000, 10.0, 64
RANK_PROCESS = str(Path(__file__).with_name("rank_process.py"))


@dataclass
class Connection:
    """A connection from the monitor of one rank (rank_process.py)."""

    socket: socket.socket
    text: bytes = b""  # the part of the next report that has arrived
    rank: RankState | None = None  # None before the first report
    since: float = field(default_factory=time.monotonic)


class Connections(Reports):
    """The reports of the monitors of all ranks; also sends signals to the ranks.

    With `local` all ranks are on this machine: others then cannot connect.  With `label` each line
    of output begins with its rank; `logs` is a folder for one file of output for each rank.  With
    `survive` the launcher is to take every end of a rank that failed for a loss.
    """

    complete = True

    def __init__(
        self,
        ranks: int,
        local: bool = False,
        label: bool = False,
        logs: str | None = None,
        roll_call: float = 0,
        survive: bool = False,
    ) -> None:
        raise_file_limit(ranks)
        super().__init__(ranks, roll_call)
        self.local, self.label, self.logs, self.survive = local, label, logs, survive
        self.secret = secrets.token_hex(16)
        self.variables = {SECRET: self.secret}
        self._connections: list[Connection] = []
        self._sent: list[int] = []  # signals; ranks that connect later get them too
        self._listener = open_listener(local)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)

    @property
    def address(self) -> str:
        """Name, addresses and port at which ranks reach this process: ``HOST,ADDRESS,…/PORT``."""
        names = [LOOPBACK] if self.local else [socket.gethostname(), *addresses()]
        hosts = dict.fromkeys(names)
        return f"{','.join(hosts)}/{self._listener.getsockname()[1]}"

    def command(self, program: list[str]) -> list[str]:
        """Return the command that the launcher starts for each rank: a monitor of `program`."""
        options = ["label"] * self.label + [f"logs={self.logs}"] * bool(self.logs)
        options += [f"roll-call={self.roll_call}"] * bool(self.roll_call)
        options += ["survive"] * self.survive
        # -I -S: without the user's modules and site-packages, for one starts beside every rank.
        monitor = [sys.executable, "-I", "-S", RANK_PROCESS, self.address, *options]
        return [*monitor, "--", *program]

    def send(self, number: int, rank: int | None = None) -> bool:
        """Send a signal to the program of a rank, or of every one, also of later ones."""
        if rank is None:
            self._sent.append(number)
        for connection in self._connections:
            if connection.rank is not None and rank in (None, connection.rank.number):
                _tell(connection, signal=int(number))
        return True

    def close(self) -> None:
        """Close all connections, having told the monitors that this is no accident."""
        for connection in self._connections:
            _tell(connection, over=1)
        super().close()

    def ask(self, launcher: int) -> dict[int, Seen | None]:
        """Ask the monitors, which will answer."""
        asked = [each for each in self._connections if each.rank is not None]
        for connection in asked:
            _tell(connection, ask="where")
        return {each.rank.number: None for each in asked if each.rank is not None}

    def _read(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in ready:
            if isinstance(key.fileobj, int):  # the launcher has ended
                self._forget(key)
            elif key.data is not None:
                self._receive(key.data)
        # After the others: it may close a connection that is among `ready`.
        if any(key.fileobj is self._listener for key, _ in ready):
            self._accept()
        until = time.monotonic() - UNKNOWN_SECONDS
        for connection in [c for c in self._connections if c.rank is None and c.since < until]:
            self._drop(connection)

    def _accept(self) -> None:
        """Accept a connection; the oldest unknown ones make room for it."""
        # Whoever reaches this host may connect.  So those that have not shown the secret are few,
        # and the newest one takes the place of the oldest: they cannot keep the ranks out.
        unknown = [c for c in self._connections if c.rank is None]
        full = len(self._connections) >= self.ranks + UNKNOWN_AT_MOST
        try:
            accepted, _ = self._listener.accept()
            # A node that is down closes nothing: the kernel finds that out within 20 s.
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

    def _receive(self, connection: Connection) -> None:
        try:
            data = connection.socket.recv(65536)
        except OSError:
            data = b""
        # A stream has no borders: the last piece is a report only once its line has ended.
        *texts, connection.text = (connection.text + data).split(b"\n")
        good = bool(data) and all(self._take(connection, text) for text in texts)
        if not good or len(connection.text) > self._limit(connection):
            self._drop(connection)

    def _limit(self, connection: Connection) -> int:
        return UNKNOWN_BYTES if connection.rank is None else MAX_LINE

    def _take(self, connection: Connection, text: bytes) -> bool:
        """Take the text of a report; return False if its sender is unknown and stays so.

        The first one has the rank, its host, and the job's secret, which shows that it is one of
        this job.
        """
        with suppress(ValueError):  # no report
            report = read_json(text, "a report", Report, longest=self._limit(connection))
            if connection.rank is None:
                given = report.secret.encode("utf-8", "replace")
                if not secrets.compare_digest(given, self.secret.encode()):
                    return False
                if not 0 <= report.rank < self.ranks:
                    return False
                connection.rank = RankState(report.rank, report.host)
                for number in self._sent:
                    _tell(connection, signal=int(number))
            self._new.append((connection.rank, report))
        return connection.rank is not None

    def _drop(self, connection: Connection) -> None:
        """Close a connection; a rank whose end has not been reported is lost."""
        self._forget(self._selector.get_key(connection.socket))
        self._connections.remove(connection)
        if connection.rank is not None:
            self._new.append((connection.rank, None))


def _tell(connection: Connection, **words: int | str) -> None:
    try:
        connection.socket.sendall(json.dumps(words).encode() + b"\n")
    except OSError:
        pass  # the rank has ended


LOOPBACK = "127.0.0.1"


def open_listener(local: bool = False) -> socket.socket:
    """Return a listening socket for IPv4 and, if the kernel has it, IPv6.

    With `local`, only processes of this machine can connect to it.
    """
    if local:
        # A large backlog: all ranks connect at the same moment.
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
