"""One rank under ``mpidist run``: starts the program, and tells how it ended.

``python -I -S rank_process.py FROM [label] [logs=DIR] -- PROGRAM…``; FROM is ``HOST,HOST,…/PORT``
of the run, and the environment has its word.  It is a file of its own, of the standard library
only, for it runs beside every rank.  The program and what it starts are a process group of their
own: signals go to all of it, and it does not outlive the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO

WORD, NOTES = "MPIDIST_RUN_WORD", "MPIDIST_RUN_NOTES"  # as in run_notes.py
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
PATIENT = (signal.SIGUSR1, signal.SIGUSR2)  # wait until the program has a handler for them
HANDLED_WITHIN, LOOK_AGAIN = 60.0, 0.05  # seconds
CONNECT_SECONDS, PUMP_SECONDS = 10.0, 5.0
TOLD_SECONDS = 0.5  # in which what was written is carried before the end is told
REST_SECONDS = 2.0  # that what a program leaves behind has to end by itself, and then after SIGTERM
GRACE_SECONDS = 10.0  # from asking a program to end, when the run is gone, to killing it
PR_SET_PDEATHSIG = 1


def launched_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank that an MPI launcher gave to this process; None if none started it."""
    return next((int(environ[n]) for n in RANKS if environ.get(n, "").isdigit()), None)


def connect(where: str) -> socket.socket | None:
    """Reach the run by the first of its addresses that answers."""
    hosts, _, port = where.rpartition("/")
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
        self.rank, self.label, self.logs = launched_rank() or 0, label, logs
        self.child: subprocess.Popen | None = None
        self.line = connect(where)
        if self.line is None:
            sys.stderr.write(f"mpidist: rank {self.rank} cannot reach mpidist run at {where}\n")
        word = os.environ.pop(WORD, "")
        self.speaking, self.reading = threading.Lock(), threading.Lock()
        self.tell(word=word, rank=self.rank, host=socket.gethostname())
        self.notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notes.bind("")  # the kernel finds an abstract name
        os.environ[NOTES] = os.fsdecode(self.notes.getsockname()[1:])

    def tell(self, **what: object) -> None:
        """Send something to the run."""
        with self.speaking:
            if self.line is not None:
                try:
                    self.line.sendall(json.dumps(what).encode() + b"\n")
                except OSError:
                    self.line = None

    def read_notes(self) -> None:
        """Tell the run what the program says of itself, as long as there is a program."""
        while select.select([self.notes], (), ())[0]:
            self.pass_notes()

    def pass_notes(self) -> None:
        """Tell the run what the program has said."""
        with self.reading, contextlib.suppress(BlockingIOError):
            while note := self.notes.recv(64, socket.MSG_DONTWAIT):
                self.tell(mpi=note.decode(errors="replace"))

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
        """Send a signal to the program and all that it has started."""
        if number in PATIENT:
            threading.Thread(target=self.hand_on, args=(number,), daemon=True).start()
        elif self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)  # type: ignore[union-attr]

    def alive(self) -> bool:
        """Tell whether the program runs."""
        return self.child is not None and self.child.poll() is None

    def hand_on(self, number: int) -> None:
        """Send a signal to those processes of the program that handle it, as soon as one does.

        It would end a program that has just begun, and the processes around it.
        """
        until = time.monotonic() + HANDLED_WITHIN
        while self.alive():
            handling = [pid for pid in group(self.child.pid) if handles(pid, number)]  # type: ignore[union-attr]
            for pid in handling:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if handling:
                return
            if time.monotonic() > until:
                name = signal.Signals(number).name
                sys.stderr.write(f"mpidist: rank {self.rank}: nothing here handles {name}\n")
                return
            time.sleep(LOOK_AGAIN)  # the kernel does not tell when a process takes a handler

    def run(self, program: list[str]) -> int:
        """Run the program; give its status, below zero for a signal."""
        piped = subprocess.PIPE if self.label or self.logs else None
        try:
            self.child = subprocess.Popen(
                program, stdout=piped, stderr=piped, close_fds=False, preexec_fn=own_group
            )
        except OSError as error:
            sys.stderr.write(
                f"mpidist: rank {self.rank}: {program[0]} cannot be started: {error}\n"
            )
            self.tell(status=127)
            return 127
        keeper, well = keep(self.child.pid)
        for number in FORWARDED:
            signal.signal(number, self.send)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if self.line is not None:
            threading.Thread(target=self.listen, daemon=True).start()
            threading.Thread(target=self.read_notes, daemon=True).start()
        pumps = self.pump() if piped else []
        status = self.child.wait()
        join(pumps, TOLD_SECONDS)
        self.pass_notes()
        self.tell(status=status)  # at once: other ranks may end because of it, and tell that
        end_rest(self.child.pid)
        join(pumps, PUMP_SECONDS)
        with contextlib.suppress(BrokenPipeError):  # where all is killed, the keeper may be first
            os.write(well, b".")
        os.waitpid(keeper, 0)
        return status

    def pump(self) -> list[threading.Thread]:
        """Carry what the program writes to the file of this rank, and to the run's terminal."""
        file: IO[bytes] | None = None
        if self.logs:
            path = os.path.join(self.logs, f"rank-{self.rank:05d}.log")
            try:
                os.makedirs(self.logs, exist_ok=True)
                file = open(path, "ab", buffering=0)  # noqa: SIM115  (for the rest of the process)
            except OSError as error:
                sys.stderr.write(f"mpidist: rank {self.rank} has no log, all is shown: {error}\n")
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


def own_group() -> None:
    """Have the program lead a group of processes, and killed if this process is."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def keep(leader: int) -> tuple[int, int]:
    """Start a process that kills the group of `leader` if this process is killed.

    The kernel does so with the leader alone (PR_SET_PDEATHSIG), not with what a shell started.

    Returns
    -------
    keeper, well : int
        The process, and the end of a pipe: a byte in it says that there is nothing to kill.
    """
    ours, well = os.pipe()
    keeper = os.fork()
    if keeper:
        os.close(ours)
        return keeper, well
    try:
        os.setsid()  # else it would be killed with its parent
        os.closerange(0, ours)
        os.closerange(ours + 1, 4096)
        if not os.read(ours, 1):
            os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


def join(threads: list[threading.Thread], seconds: float) -> None:
    """Wait for threads, not longer than so for all of them."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def end_rest(leader: int) -> None:
    """End what a program has left running in its group, as srun does with a task.

    A moment is left to what ends by itself, such as the ``tee`` that a shell writes to.
    """
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + REST_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, number)
        while group(leader):
            if time.monotonic() > until:
                break
            time.sleep(LOOK_AGAIN)  # they are no children of this process: nothing to wait on
        else:
            return


def group(leader: int) -> list[int]:
    """List the processes of a group, without those that have ended."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{entry}/stat") as file:
            state, _, number = file.read().rpartition(")")[2].split()[:3]
            if int(number) == leader and state != "Z":
                found.append(int(entry))
    return found


def handles(pid: int, number: int) -> bool:
    """Tell whether a process has a handler for a signal."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        masks = (line.split()[1] for line in file if line.startswith("SigCgt"))
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
    return False


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
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a program to send them to
    cut = arguments.index("--")
    where, options = arguments[0], arguments[1:cut]
    logs = next((o.partition("=")[2] for o in options if o.startswith("logs=")), None)
    leave(Member(where, "label" in options, logs).run(arguments[cut + 1 :]))


if __name__ == "__main__":
    main(sys.argv[1:])
