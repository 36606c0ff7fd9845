"""Watches a launch: hears from every rank how it ended, so that the exit code tells the truth."""

from __future__ import annotations

import json
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..interfaces import addresses

MEMBER = str(Path(__file__).with_name("member.py"))
PATIENCE = 8.0  # seconds that the launcher has to end a job of which a rank was lost
UNTIL_TOLD = 1.0  # seconds in which the rank that is the cause may report, after one is lost
STEP = 3.0  # seconds between asking, killing the ranks, and killing the launcher
LONGEST = 1 << 16  # bytes of a line that a member says
LAST_WORDS, AFTER_FAILURE = 5.0, 0.5  # seconds in which reports come after the launcher's end
TO_RANKS = (signal.SIGUSR1, signal.SIGUSR2)
TO_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LOST = "lost"


@dataclass
class Rank:
    """What is known of a rank: where it runs, and its status once it has ended."""

    number: int
    host: str
    status: int | str | None = None

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
            how = "is lost: it was killed together with the process beside it, or its node is gone"
        elif isinstance(self.status, int) and self.status < 0:
            how = f"was ended by signal {-self.status} ({signal.Signals(-self.status).name})"
        return f"rank {self.number} on {self.host} {how}"


@dataclass
class Line:
    """The connection of a rank."""

    socket: socket.socket
    text: bytes = b""
    rank: Rank | None = None


@dataclass
class Watch:
    """Runs a launcher, and hears of its ranks.

    Parameters
    ----------
    ranks : int
        How many there are to be.
    label : bool
        Whether each line that a rank writes begins with its number.
    logs : str, optional
        Folder for one file a rank.
    """

    ranks: int
    label: bool = False
    logs: str | None = None
    known: dict[int, Rank] = field(default_factory=dict)
    ended: list[Rank] = field(default_factory=list)  # in the order of their ends

    def __post_init__(self) -> None:
        self._word = secrets.token_hex(8)
        self._lines: list[Line] = []
        self._selector = selectors.DefaultSelector()
        self._door = socket.create_server(("", 0), backlog=4096)
        self._door.setblocking(False)
        self._selector.register(self._door, selectors.EVENT_READ)
        self._bad_since: float | None = None
        self._told = False
        self._done = 0  # steps taken to end a job of which a rank was lost

    def command(self, program: Sequence[str]) -> list[str]:
        """Give what a launcher has to start in place of `program`."""
        port = self._door.getsockname()[1]
        hosts = ",".join(dict.fromkeys([socket.gethostname(), *addresses()]))
        options = ["label"] * self.label + [f"logs={self.logs}"] * bool(self.logs)
        where = f"{hosts}:{port}:{self._word}"
        return [sys.executable, "-I", "-S", MEMBER, where, *options, "--", *program]

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the launcher; give 0 if it and every rank ended well, else why not as a number."""
        try:
            self._launcher = subprocess.Popen(command, env=dict(environ))
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be started: {error}") from error
        old = {number: signal.signal(number, self._pass) for number in (*TO_RANKS, *TO_LAUNCHER)}
        try:
            while self._launcher.poll() is None:
                self._listen(0.1)
                self._end_if_stuck()
            status = self._launcher.returncode
            until = time.monotonic() + (LAST_WORDS if status == 0 else AFTER_FAILURE)
            while len(self.ended) < self.ranks and time.monotonic() < until:
                self._listen(0.1)
            return self._verdict(status)
        finally:
            if self._launcher.poll() is None:  # an error here must not leave the job alone
                self._launcher.kill()
                self._launcher.wait()
            for number, handler in old.items():
                signal.signal(number, handler)
            self._selector.close()
            for line in self._lines:
                line.socket.close()
            self._door.close()

    # -- signals --------------------------------------------------------------------------------

    def _pass(self, number: int, _: Any) -> None:
        if number in TO_RANKS:
            self.signal(number)
        else:
            self._launcher.send_signal(number)
            self._bad_since = self._bad_since or time.monotonic()

    def signal(self, number: int) -> None:
        """Send a signal to the program of every rank."""
        for line in self._lines:
            try:
                line.socket.sendall(json.dumps({"signal": int(number)}).encode() + b"\n")
            except OSError:
                pass  # it has ended

    def _end_if_stuck(self) -> None:
        """End the job if the launcher does not, after a rank was lost."""
        if self._bad_since is None:
            return
        if time.monotonic() > self._bad_since + UNTIL_TOLD:
            self._tell()
        if time.monotonic() < self._bad_since + PATIENCE + self._done * STEP:
            return
        if not self._done:
            _say(f"the launcher has not ended the job within {PATIENCE:g} s: ending it")
        acts = (
            lambda: self.signal(signal.SIGTERM),
            lambda: self.signal(signal.SIGKILL),
            self._launcher.terminate,
            self._launcher.kill,
        )
        acts[min(self._done, len(acts) - 1)]()
        self._done += 1

    # -- what the ranks say ---------------------------------------------------------------------

    def _listen(self, seconds: float) -> None:
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
            if said.get("word") != self._word:
                raise ValueError("a process that does not belong to this run")
            line.rank = self.known[said["rank"]] = Rank(said["rank"], said["host"])
        elif "status" in said:
            self._end(line.rank, said["status"])

    def _end(self, rank: Rank, status: int | str) -> None:
        rank.status = status
        self.ended.append(rank)
        if not rank.good:
            self._bad_since = self._bad_since or time.monotonic()
            if status != LOST:
                self._tell()

    def _tell(self) -> None:
        """Name the first rank that ended badly, once; rather one that says how than a lost one."""
        bad = self._bad()
        if bad and not self._told:
            self._told = True
            _say(str(bad[0]))

    def _bad(self) -> list[Rank]:
        bad = [rank for rank in self.ended if not rank.good]
        return sorted(bad, key=lambda rank: rank.status == LOST)

    def _verdict(self, status: int) -> int:
        """Give the exit code: that of the first rank that ended badly, if any did."""
        self._tell()
        bad = self._bad()
        first = next((rank for rank in self.ended if not rank.good), None)
        if first is not None and first is not bad[0]:
            _say(f"before that {first}")  # the others may have ended because of it
        if bad and (bad[0].status != LOST or status == 0):
            return bad[0].code
        if status:
            return status if status > 0 else 128 - status
        absent = sorted(set(range(self.ranks)) - {rank.number for rank in self.ended})
        if not absent:
            return 0
        names = ", ".join(map(str, absent[:8])) + ", …" * (len(absent) > 8)
        _say(
            f"the launcher ended with exit code 0, but how rank {names} of {self.ranks} ended is "
            "not known: it was never started, or could not reach this host"
        )
        return 1


def _say(text: str) -> None:
    sys.stderr.write(f"mpidist run: {text}\n")
    sys.stderr.flush()
