"""The monitor of one rank under ``mpidist run``: starts the program, and reports how it ended.

``python -I -S rank_process.py ADDRESS [label] [logs=DIR] [roll-call=S] [survive] -- PROGRAM…``;
ADDRESS is ``HOST,HOST,…/PORT`` of ``mpidist run``, and the environment has its secret.  With
``label`` each line of output begins with the rank; DIR is a folder for one file of output for each
rank; S are the seconds after which a flight record that has not moved is reported; with ``survive``
a program that failed is lost to the launcher, whichever its exit code.  One such
process runs beside every rank, so it uses the standard library only.  The program and its children
are a process group: signals go to all of it, and it does not outlive the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import IO

# The processes of one rank; each starts the next::
#
#     mpidist run -> mpiexec or srun -> monitor -> program -> its children
#                                          |       |----- one group ------|
#                                          +-> guard: kills the group if the monitor is killed
#
# Between the monitor and mpidist run, past the launcher, go reports and signals for the ranks.
SECRET = "MPIDIST_RUN_SECRET"  # as in connections.py
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
DEFERRED = (signal.SIGUSR1, signal.SIGUSR2)  # kept until the program has a handler for them
HANDLED_WITHIN, POLL_SECONDS = 60.0, 0.05
CONNECT_SECONDS, OUTPUT_SECONDS = 10.0, 5.0
REPORT_SECONDS = 0.5  # for the last output, before the end of the program is reported
REST_SECONDS = 2.0  # for processes that the program left behind: to end, and then after SIGTERM
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL when mpidist run is gone
PR_SET_PDEATHSIG = 1
VAULTS, OF_NODES = "MPIDIST_VAULTS", "mpidist-vaults-nodes-"  # as in records.py and restarts.py
DO_NOT_KILL = b"."  # to the guard: any byte; without one the pipe ends when this process is killed


def load(room: str, name: str) -> ModuleType:
    """Load a module of a room of mpidist without its package."""
    path = Path(__file__).parents[1] / room / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_mpidist_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


notes, movement = load("communicator", "launcher_notes"), load("launcher", "movement")
starved = load("launcher", "starved")


def connect(address: str) -> socket.socket | None:
    """Connect to the first address of ``mpidist run`` that answers; None if none does."""
    hosts, _, port = address.rpartition("/")
    for host in hosts.split(","):
        try:
            connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        except OSError:
            continue
        connection.settimeout(None)
        return connection
    return None


class RankProcess:
    """The program of one rank, and the connection to ``mpidist run``.

    The program sends *notes*, one datagram of JSON each: MPI is starting or has started, the
    exception that ends it, its exit code.  For the parameters see this module's docstring.
    """

    def __init__(self, address: str, label: bool, logs: str | None, roll_call: float = 0):
        self.rank, self.label, self.logs = notes.launched_rank() or 0, label, logs
        self.roll_call = roll_call
        self.flight = ""  # folder of the program's flight record
        self.starved = starved.Starved()
        self.child: subprocess.Popen | None = None
        self.records = ""  # this node's folder for the records of a job on several nodes
        self.connection = connect(address)
        if self.connection is None:
            sys.stderr.write(f"mpidist: rank {self.rank} cannot reach mpidist run at {address}\n")
        secret = os.environ.pop(SECRET, "")
        self.sending, self.reading = threading.Lock(), threading.Lock()
        self.report(secret=secret, rank=self.rank, host=socket.gethostname())
        self.notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notes.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.notes.bind("")  # the kernel finds an abstract name
        os.environ[notes.NOTES] = os.fsdecode(self.notes.getsockname()[1:])

    @property
    def log_path(self) -> str:
        """Path of the file for the output of this rank."""
        return os.path.join(self.logs or "", f"rank-{self.rank:05d}.log")

    def report(self, **facts: object) -> bool:
        """Send facts to ``mpidist run`` as one line of JSON; return whether it could be reached."""
        with self.sending:
            if self.connection is not None:
                try:
                    self.connection.sendall(json.dumps(facts).encode() + b"\n")
                except OSError:
                    self.connection = None
            return self.connection is not None

    def read_notes(self) -> None:
        """Forward the program's notes to ``mpidist run`` as they arrive; never returns."""
        while select.select([self.notes], (), ())[0]:
            self.forward_notes()

    def forward_notes(self) -> None:
        """Forward to ``mpidist run`` the notes that have arrived, at most `AT_ONCE` (1000)."""
        with self.reading:
            for _ in range(notes.AT_ONCE):
                received = notes.receive_note(self.notes)
                if received is None:  # more may come: it does not wait for them
                    return
                pid, facts = received  # whichever process of the program sent them
                self.forward_note(facts)
                if "mpi" in facts:  # a shell around the program may have changed its group
                    self.starved.see(pid)
                if isinstance(facts.get("flight"), str):
                    self.flight = facts["flight"]
                    if self.roll_call:
                        threading.Thread(target=self.watch_record, args=(pid,), daemon=True).start()

    def forward_note(self, note: dict) -> None:
        """Forward the facts of a note that are the program's to tell to ``mpidist run``.

        An exception is also written to the rank's log, and printed if it cannot be forwarded: the
        program itself does not print it.
        """
        told = "mpi", "failure", "exit", "asked", "flight", "late", "without"
        facts = {name: note[name] for name in told if name in note}
        failure = note.get("failure")
        text = str(failure.get("text", "")) if isinstance(failure, dict) else ""
        with contextlib.suppress(OSError):
            if text and self.logs:
                with open_log(self.log_path) as file:
                    file.write(text.encode(errors="replace"))
        if facts and not self.report(**facts):
            sys.stderr.write(text)

    def receive_signals(self) -> None:
        """Pass on signals of ``mpidist run``, and answer it; end the program if it is gone."""
        over = False  # it has said so: its launcher has ended
        try:
            assert self.connection is not None
            for text in self.connection.makefile():
                words = json.loads(text)
                if "signal" in words:
                    self.send(words["signal"])
                elif "over" in words:
                    over = True
                else:
                    threading.Thread(target=self.answer, daemon=True).start()
        except OSError:
            pass
        # Before the program ends: then the launcher may kill this process, too.
        if self.records and not over:
            shutil.rmtree(self.records, ignore_errors=True)  # there will be no other start
        # mpidist run is gone.  A rank inside an MPI call does not react to SIGTERM.
        self.send(signal.SIGTERM)
        if self.child is not None:
            try:
                self.child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                self.send(signal.SIGKILL)

    def answer(self) -> None:
        """Report where the program is."""
        if self.child is None:
            return
        pid = self.child.pid
        try:
            # The package is imported when the first question comes: few jobs hang.
            if (folder := str(Path(__file__).parents[2])) not in sys.path:
                sys.path.append(folder)
            look = importlib.import_module("mpidist.launcher.roll_call").look
            (seen,) = look({pid: self.flight})
            self.report(seen=vars(seen))
        except Exception as error:  # the monitor goes on
            self.report(seen={"pid": pid, "why": f"{type(error).__name__}: {error}"})

    def watch_record(self, pid: int) -> None:
        """Report when the flight record of a process ceases to move, and when it moves again."""
        record, before = movement.Movement(self.flight, pid, self.roll_call), None
        while (still := record.still()) is not None:
            if still is not before:
                self.report(still=still)
            before = still
            time.sleep(record.pause)

    def send(self, number: int, _: object = None) -> None:
        """Send a signal to the program's process group.

        SIGUSR1 and SIGUSR2 go only to processes with a handler: see :meth:`send_when_handled`.
        """
        if number in DEFERRED:
            threading.Thread(target=self.send_when_handled, args=(number,), daemon=True).start()
        elif self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, number)  # type: ignore[union-attr]

    def alive(self) -> bool:
        """Return whether the program is still running."""
        return self.child is not None and self.child.poll() is None

    def send_when_handled(self, number: int) -> None:
        """Send a signal to those processes of the program that have a handler for it.

        If there is none yet, wait up to 60 s for one: without a handler the signal would kill a
        program that has just started, or a shell around it.
        """
        until = time.monotonic() + HANDLED_WITHIN
        while self.alive():
            handling = [pid for pid in group(self.child.pid) if notes.handles(pid, number)]  # type: ignore[union-attr]
            for pid in handling:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if handling:
                return
            if time.monotonic() > until:
                name = signal.Signals(number).name
                sys.stderr.write(
                    f"mpidist: rank {self.rank}: no process has a handler for {name}\n"
                )
                return
            time.sleep(POLL_SECONDS)  # the kernel has no event for a new handler

    def run(self, program: list[str]) -> int:
        """Run the program; return its status: negative for a signal, 127 if it cannot start."""
        piped = subprocess.PIPE if self.label or self.logs else None
        try:
            self.child = subprocess.Popen(
                program, stdout=piped, stderr=piped, close_fds=False, preexec_fn=own_group
            )
        except OSError as error:
            sys.stderr.write(
                f"mpidist: rank {self.rank}: {program[0]} cannot be started: {error}\n"
            )
            self.report(status=127)
            return 127
        self.starved.see(self.child.pid)
        guard, pipe = start_guard(self.child.pid)
        for number in FORWARDED:
            signal.signal(number, self.send)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if self.connection is not None:
            threading.Thread(target=self.receive_signals, daemon=True).start()
            threading.Thread(target=self.read_notes, daemon=True).start()
        threads = self.forward_output() if piped else []
        status = self.child.wait()
        # The last output and the notes go before the status, which may end the job.  But the wait
        # is short: a failure must be told before those of other ranks, which it may cause, and
        # processes that the program left behind may hold the pipes of the output for long.
        join(threads, REPORT_SECONDS)
        # What the program itself said comes before how it ended: the first may be the reason.
        self.forward_notes()
        self.report(status=status, starved=self.starved.now())
        end_rest(self.child.pid)
        join(threads, OUTPUT_SECONDS)  # what those processes wrote
        # Tell the guard not to kill the group.  If everything is being killed, the guard may
        # already be gone, and the pipe broken.
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe, DO_NOT_KILL)
        os.waitpid(guard, 0)
        return status

    def forward_output(self) -> list[threading.Thread]:
        """Start and return threads that copy the program's output to the log and to the screen."""
        file: IO[bytes] | None = None
        if self.logs:
            try:
                os.makedirs(self.logs, exist_ok=True)
                file = open_log(self.log_path)
            except OSError as error:
                sys.stderr.write(
                    f"mpidist: rank {self.rank} has no log, its output is shown: {error}\n"
                )
        assert self.child is not None
        ends = ((self.child.stdout, sys.stdout.buffer), (self.child.stderr, sys.stderr.buffer))
        threads = [threading.Thread(target=self.copy_output, args=(*end, file)) for end in ends]
        for thread in threads:
            thread.daemon = True
            thread.start()
        return threads

    def copy_output(self, source: IO[bytes], screen: IO[bytes], file: IO[bytes] | None) -> None:
        """Copy lines to the log `file`, if there is one, and to the screen.

        On the screen each line begins with the rank if `label`; with a log, only rank 0's lines go
        there.
        """
        shown = file is None or self.rank == 0
        prefix = f"{self.rank}: ".encode() if self.label else b""
        for text in source:  # up to the end, whatever fails: a full pipe would block the program
            if file is not None:
                try:
                    file.write(text)
                except OSError as error:
                    file = None
                    sys.stderr.write(f"mpidist: rank {self.rank}: its log ends: {error}\n")
            if shown:
                try:
                    screen.write(prefix + text)
                    screen.flush()
                except OSError:
                    shown = False


def open_log(path: str) -> IO[bytes]:
    """Open a rank's log to append to it; OSError if it is a symbolic link, a pipe or a device."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


def hold_records() -> str:
    """Make the folder of this node for the records of a job on several, and lock it until the end.

    On the node of ``mpidist run`` that has made it, and holds it.  Return it; "" if there is none.
    """
    folder = os.environ.get(VAULTS, "")
    if not os.path.basename(folder).startswith(OF_NODES):
        return ""
    with contextlib.suppress(OSError):  # the program says what is wrong with it
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fcntl.flock(os.open(folder, flags), fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


def own_group() -> None:
    """Make this new process, before it runs the program, lead a group and die with the monitor."""
    os.setpgid(0, 0)
    # The launcher was started without SIGQUIT, so that a terminal's does not end it.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*FORWARDED, signal.SIGQUIT))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_guard(leader: int) -> tuple[int, int]:
    """Start a process that kills the process group of `leader` if this process is killed.

    The kernel kills the leader only (PR_SET_PDEATHSIG), not the children of a shell.  Return the
    guard's process id, and the end of a pipe, for :data:`DO_NOT_KILL`.
    """
    ours, pipe = os.pipe()
    guard = os.fork()
    if guard:
        os.close(ours)
        return guard, pipe
    try:
        os.setsid()  # otherwise it would be killed with its parent
        os.closerange(0, ours)
        os.closerange(ours + 1, 4096)
        if not os.read(ours, 1):
            os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(0)


def join(threads: list[threading.Thread], seconds: float) -> None:
    """Wait until all threads have ended, but at most `seconds` for all of them together."""
    until = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def end_rest(leader: int) -> None:
    """End the processes left in the group of an ended program, as srun does at the end of a task.

    It first waits 2 s: some end by themselves, such as a ``tee`` that a shell writes to.
    """
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + REST_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, number)
        while group(leader):
            if time.monotonic() > until:
                break
            # They are not children of this process, which it could wait for.
            time.sleep(POLL_SECONDS)
        else:
            return


def group(leader: int) -> list[int]:
    """Return the ids of the processes in the group of `leader`, without zombies."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError):
            text = Path(f"/proc/{entry}/stat").read_text(encoding="ascii", errors="replace")
            state, _, number = text.rpartition(")")[2].split()[:3]
            if int(number) == leader and state != "Z":
                found.append(int(entry))
    return found


def exit_like(status: int) -> None:
    """End this process as the program ended: with exit code `status`, or by signal -`status`."""
    sys.stdout.flush()
    if status < 0:
        # The program has written a core file already.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def main(arguments: list[str]) -> None:
    """Run the program of one rank and monitor it; for the arguments see this module's docstring."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a program
    cut = arguments.index("--")
    address, options = arguments[0], arguments[1:cut]
    logs = next((o.partition("=")[2] for o in options if o.startswith("logs=")), None)
    seconds = next((float(o.partition("=")[2]) for o in options if o.startswith("roll-call=")), 0)
    process = RankProcess(address, "label" in options, logs, seconds)
    process.records = hold_records()
    status = process.run(arguments[cut + 1 :])
    # Open MPI's launcher counts a rank that ends by an exit code twice, and then ends too soon.
    exit_like(-signal.SIGKILL if "survive" in options and status > 0 else status)


if __name__ == "__main__":
    main(sys.argv[1:])
