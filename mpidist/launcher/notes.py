"""Reports without monitors: notes of Python ranks on this host, and their ends by the kernel."""

from __future__ import annotations

import secrets
import selectors
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace

from ..communicator.launcher_notes import AT_ONCE, NOTES, receive_note
from ..foreign import typed
from .movement import Movement
from .ranks import RankState, Report, Reports, Seen
from .starved import Starved


class Notes(Reports):
    """The notes of a job's ranks: see ``communicator/launcher_notes.py``."""

    complete = False

    def __init__(self, ranks: int, roll_call: float = 0) -> None:
        super().__init__(ranks, roll_call)
        self._known: dict[int, RankState] = {}
        self._pids: dict[int, int] = {}  # of the first note of each rank
        self._folders: dict[int, str] = {}  # of their flight records
        self._movements: dict[int, Movement] = {}
        self._starved: dict[int, Starved] = {}
        self._gone: list[RankState] = []  # ended before their first notes were read
        self._look_at = 0.0
        address = f"mpidist-{secrets.token_hex(8)}"
        self.variables = {NOTES: address}
        self._notes = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notes.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notes.bind(f"\0{address}")
        self._notes.setblocking(False)
        self._selector.register(self._notes, selectors.EVENT_READ)

    def _read(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        # First the notes: a process that has ended has sent its own before.
        ended: list[RankState] = []
        for _ in range(AT_ONCE):
            found = receive_note(self._notes)
            if found is None:
                ended, self._gone = self._gone, []
                break
            with suppress(TypeError):  # not a note
                self._take(found[0], typed(found[1], Report))
        for key, _ in ready:
            if key.fileobj is not self._notes:
                self._forget(key)
                if key.data is not None:
                    ended.append(key.data)
        for rank in ended:
            rank.starved = self._starved[rank.number].now()
            self._new.append((rank, None))
        if self._movements and time.monotonic() > self._look_at:
            self._look()

    def _look(self) -> None:
        """Report which flight records have begun or ceased to move."""
        for number, movement in list(self._movements.items()):
            rank, still = self._known[number], movement.still()
            self._look_at = time.monotonic() + movement.pause
            if still is None:  # the record is gone: nobody knows any more whether the rank moves
                del self._movements[number]
                rank.still = None
            elif still is not rank.still:
                self._new.append((rank, Report(still=still)))

    def ask(self, launcher: int) -> dict[int, Seen | None]:
        """Look at the ranks of this host, also at those that have sent no note."""
        # Here: mpidist run --help starts fast.
        from ..backends.flight import process_started
        from .roll_call import look, ranks_below

        found = {**ranks_below(launcher), **self._pids}
        left = {rank: pid for rank, pid in found.items() if process_started(pid)}
        folders = {pid: self._folders.get(rank, "") for rank, pid in left.items()}
        return dict(zip(left, look(folders)))

    def _take(self, pid: int, note: Report) -> None:
        if not 0 <= note.rank < self.ranks:
            return
        if note.rank not in self._known:
            self._known[note.rank] = RankState(note.rank, note.host)
            if not self.observe(pid, self._known[note.rank]):
                self._gone.append(self._known[note.rank])
            self._starved[note.rank] = Starved()
        if note.mpi is not None:
            self._starved[note.rank].see(pid)
        self._pids.setdefault(note.rank, pid)
        if note.flight is not None:
            self._folders[note.rank] = note.flight
            if self.roll_call:
                self._movements[note.rank] = Movement(note.flight, pid, self.roll_call)
        code = note.exit if note.failure is None else 1  # nobody reports another one
        self._new.append((self._known[note.rank], replace(note, exit=code, status=None)))


def explain(code: int, ended: list[RankState], known: list[RankState], failures: bool) -> None:
    """Record a launcher's exit code as that of the first rank to end, if it has announced none.

    Not if another rank has announced this code: Hydra may end the rest of the job before that rank.
    With `failures`, exceptions are known: then only the code of a signal (128 + N) is recorded, for
    any other code is that of the abort that follows an exception.
    """
    killed = 128 < code <= 128 + signal.SIGRTMAX  # Intel's launcher has 255 for every signal
    silent = ended and ended[0].status is None
    other = failures or any(rank.status == code for rank in known)
    if silent and (killed or not other):
        ended[0].status = 128 - code if killed else code
