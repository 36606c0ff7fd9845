"""One rank under ``mpidist run``: starts the program, and tells how it ended.

``python -I -S member.py FROM [label] [logs=DIR] -- PROGRAM…``; FROM is ``HOST,HOST,…:PORT:WORD`` of
the run.  It is a file of its own, of the standard library only, for it runs beside every rank.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from typing import IO

RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
CONNECT_SECONDS, PUMP_SECONDS = 10.0, 5.0
GRACE_SECONDS = 10.0  # from asking a program to end, when the run is gone, to killing it
PR_SET_PDEATHSIG = 1


def own_rank() -> int:
    """Give the rank that the launcher gave to this process."""
    return next((int(os.environ[n]) for n in RANKS if os.environ.get(n, "").isdigit()), 0)


def connect(where: str) -> socket.socket | None:
    """Reach the run by the first of its addresses that answers."""
    hosts, port, _ = where.split(":")
    for host in hosts.split(","):
        try:
            line = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        except OSError:
            continue
        line.settimeout(None)
        return line
    return None


class Member:
    """The program of one rank, and the line to the run."""

    def __init__(self, where: str, label: bool, logs: str | None):
        self.rank, self.label, self.logs = own_rank(), label, logs
        self.word = where.rpartition(":")[2]
        self.child: subprocess.Popen | None = None
        self.line = connect(where)
        if self.line is None:
            sys.stderr.write(f"mpidist: rank {self.rank} cannot reach mpidist run at {where}\n")
        self.tell(word=self.word, rank=self.rank, host=socket.gethostname())

    def tell(self, **what: object) -> None:
        """Send something to the run."""
        if self.line is not None:
            try:
                self.line.sendall(json.dumps(what).encode() + b"\n")
            except OSError:
                self.line = None

    def listen(self) -> None:
        """Do what the run says; end the program with it."""
        try:
            assert self.line is not None
            for text in self.line.makefile():
                self.send(json.loads(text)["signal"])
        except OSError:
            pass
        # Nobody waits for this rank any more; one that is inside of MPI does not hear the first.
        self.send(signal.SIGTERM)
        if self.child is not None:
            try:
                self.child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.send(signal.SIGKILL)

    def send(self, number: int, _: object = None) -> None:
        """Send a signal to the program."""
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def run(self, program: list[str]) -> int:
        """Run the program; give its status, below zero for a signal."""
        for number in FORWARDED:
            signal.signal(number, self.send)
        piped = subprocess.PIPE if self.label or self.logs else None
        try:
            self.child = subprocess.Popen(
                program, stdout=piped, stderr=piped, close_fds=False, preexec_fn=die_with_parent
            )
        except OSError as error:
            sys.stderr.write(
                f"mpidist: rank {self.rank}: {program[0]} cannot be started: {error}\n"
            )
            self.tell(status=127)
            return 127
        if self.line is not None:
            threading.Thread(target=self.listen, daemon=True).start()
        pumps = self.pump() if piped else []
        status = self.child.wait()
        for pump in pumps:
            pump.join(PUMP_SECONDS)
        self.tell(status=status)
        return status

    def pump(self) -> list[threading.Thread]:
        """Carry what the program writes to the file of this rank, and to the run's terminal."""
        file: IO[bytes] | None = None
        if self.logs:
            os.makedirs(self.logs, exist_ok=True)
            path = os.path.join(self.logs, f"rank-{self.rank:05d}.log")
            file = open(path, "ab", buffering=0)  # noqa: SIM115  (for the rest of the process)
        assert self.child is not None
        ends = ((self.child.stdout, sys.stdout.buffer), (self.child.stderr, sys.stderr.buffer))
        threads = [threading.Thread(target=self.carry, args=(*end, file)) for end in ends]
        for thread in threads:
            thread.daemon = True
            thread.start()
        return threads

    def carry(self, source: IO[bytes], screen: IO[bytes], file: IO[bytes] | None) -> None:
        """Carry lines; with files for all ranks, only rank 0's are shown."""
        shown = file is None or self.rank == 0
        prefix = f"{self.rank}: ".encode() if self.label else b""
        for text in source:  # to the end, whatever happens: a full pipe would stop the program
            if file is not None:
                try:
                    file.write(text)
                except OSError as error:
                    file = None
                    sys.stderr.write(f"mpidist: rank {self.rank}: its log ends here: {error}\n")
            if shown:
                try:
                    screen.write(prefix + text)
                    screen.flush()
                except OSError:
                    shown = False


def die_with_parent() -> None:
    """Have the program killed if this process is."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(status: int) -> None:
    """End as the program ended."""
    sys.stdout.flush()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has written one already
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def main(arguments: list[str]) -> None:
    """Run a rank; see above."""
    cut = arguments.index("--")
    where, options = arguments[0], arguments[1:cut]
    logs = next((o.partition("=")[2] for o in options if o.startswith("logs=")), None)
    leave(Member(where, "label" in options, logs).run(arguments[cut + 1 :]))


if __name__ == "__main__":
    main(sys.argv[1:])
