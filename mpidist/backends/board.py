"""The arrival board: shared words in which each rank records its last operation.

A rank that waits reads there which ranks have not arrived, or mean another operation.
"""

from __future__ import annotations

import atexit
import os
import platform
import weakref
from array import array
from collections.abc import Sequence
from threading import Lock

from .waiting import spin

_WIDTH = 8  # int64 words per rank: one cache line, so that ranks do not write into each other's
_PID, _LEFT, _RECOVERING = 1, 2, 3  # word 0 is the sequence number
PRINTS, HISTORY = 4, 4  # words 4 … 7 are the fingerprints of the last four operations
_GIVEN_UP, _NEVER_BEGUN = -1, -2  # instead of a fingerprint, which all arrivals compare


STORES_KEEP_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")
_LOCK = Lock()


def fence() -> None:
    """Keep loads and stores from being reordered across this point: a full memory barrier.

    A lock is taken and released twice.  Once is not enough: accesses from before and after may both
    move in between its acquire and release, and swap there.  With two, no access moves up across
    the first release nor down across the second acquire.
    """
    with _LOCK:
        pass
    with _LOCK:
        pass


class Board:
    """The arrival board of a node: per rank, the number and fingerprint of its last operations.

    Each rank has a cache line of `words` (8 int64) that all ranks of the node share: the sequence
    number of its last operation, its process id, whether it has left, and the fingerprints of its
    last `HISTORY` (4) operations: numbers that identify an operation by its description.

    `ranks` are those that write to the board, `others` the indices of the other ranks' first words;
    `texts` has the description of this rank's operations, by fingerprint.  `keep` is the owner of
    the memory of `words`.
    """

    __slots__ = ("words", "ranks", "others", "texts", "_at", "_keep", "__weakref__")

    def __init__(self, words: memoryview, rank: int, ranks: Sequence[int], keep: object = None):
        self.words, self.ranks, self._keep = words, tuple(ranks), keep
        self.texts: dict[int, str] = {}
        self._at = rank * _WIDTH
        self.others = tuple(r * _WIDTH for r in self.ranks if r != rank)  # their first words
        words[self._at + _PID] = os.getpid()
        if not _boards:
            atexit.register(_leave)
        _boards.add(self)

    @staticmethod
    def base(rank: int) -> int:
        """Return the index in `words` of the first word of `rank`."""
        return rank * _WIDTH

    def announce(self, sequence: int, fingerprint: int) -> None:
        """Announce that this rank has reached operation number `sequence`.

        Ranks that see the announcement also see all that this rank stored before it.
        """
        # writer: announce(n)             reader: different(n), on another rank
        # ─────────────────────────────   ─────────────────────────────────────────────────────
        # what it stored before n         number ≥ n ?   else this fingerprint is not stored yet
        # (fence)                         (fence)
        # prints[n % 4] = fingerprint     read prints[n % 4]
        # (fence)                         (fence)
        # number = n                      number < n + 3 ?   else that of n + 4 may lie there
        #
        # x86 keeps stores in order, and loads, so it needs none of the fences.
        if not STORES_KEEP_ORDER:
            fence()
        self.words[self._at + PRINTS + sequence % HISTORY] = fingerprint
        if not STORES_KEEP_ORDER:  # whoever reads the number then reads its fingerprint
            fence()
        self.words[self._at] = sequence

    def give_up(self, sequence: int) -> None:
        """Announce that this rank has given up operation `sequence`, or never begin it."""
        ahead = self.words[self._at] - sequence
        if ahead < 0:
            self.announce(sequence, _NEVER_BEGUN)
        elif ahead < HISTORY and self.fingerprint(sequence) >= 0:
            self.words[self._at + PRINTS + sequence % HISTORY] = _GIVEN_UP

    def given_up(self, sequence: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of `ranks` that have given up operation `sequence`, or never begin it."""
        return tuple(r for r in ranks if self.fingerprint(sequence, r) < 0)

    def never_begun(self, sequence: int) -> tuple[int, ...]:
        """Return the ranks that will never begin operation `sequence`: they failed before it."""
        different = self.different(sequence, self.fingerprint(sequence))
        return tuple(r for r in different if self.fingerprint(sequence, r) == _NEVER_BEGUN)

    def fingerprint(self, sequence: int, rank: int | None = None) -> int:
        """Return the fingerprint that a rank (default: this one) announced for an operation.

        Valid for the last `HISTORY` (4) operations that the rank announced.
        """
        base = self._at if rank is None else rank * _WIDTH
        return self.words[base + PRINTS + sequence % HISTORY]

    def all_reached(self, sequence: int) -> bool:
        """Return whether every rank on the board has reached operation number `sequence`."""
        return self.spin(sequence, (0, 0))

    def spin(self, sequence: int, patience: tuple[int, int]) -> bool:
        """Spin briefly, with `patience`; return whether all ranks have reached `sequence`."""
        if not spin(self.words, self.others, sequence, patience):
            return False
        if not STORES_KEEP_ORDER:
            fence()
        return True

    def missing(self, sequence: int) -> tuple[int, ...]:
        """Return the ranks on the board that have not reached operation number `sequence`."""
        return tuple(r for r in self.ranks if self.words[r * _WIDTH] < sequence)

    def reached(self, rank: int) -> int:
        """Return the number of the last operation that `rank` reached; 0 before the first."""
        return self.words[rank * _WIDTH]

    def different(self, sequence: int, fingerprint: int) -> tuple[int, ...]:
        """Return the ranks that announced an operation `sequence` other than `fingerprint`.

        A rank that has given up the operation is one of them.  Only the last `HISTORY` (4)
        operations are known: see `announce` for what may be read while other ranks write.
        """
        words, found = self.words, []
        at = PRINTS + sequence % HISTORY
        for rank in self.ranks:
            base = rank * _WIDTH
            if words[base] < sequence or words[base + at] == fingerprint:
                continue
            if not STORES_KEEP_ORDER:  # the fingerprint may have been read before the number
                fence()
                if words[base + at] == fingerprint:
                    continue
                fence()
            # Not HISTORY: a rank at n + 3 may have stored the fingerprint of n + 4, in this very
            # word, and not yet the number.
            if words[base] - sequence < HISTORY - 1:
                found.append(rank)
        return tuple(found)

    def leave(self) -> None:
        """Announce that this rank's process is exiting: it reaches no further operation."""
        if self.words[self._at + _PID] == os.getpid():  # not in a forked child
            if not STORES_KEEP_ORDER:  # no rank may see this before its last announcement
                fence()
            self.words[self._at + _LEFT] = 1

    def left(self, sequence: int) -> tuple[int, ...]:
        """Return the ranks that left before they reached operation number `sequence`."""
        gone = [r for r in self.ranks if self.has_left(r)]
        if gone and not STORES_KEEP_ORDER:
            fence()
        return tuple(r for r in gone if self.words[r * _WIDTH] < sequence)

    def has_left(self, rank: int) -> bool:
        """Return whether `rank` has left: its process is exiting, or has exited normally."""
        return bool(self.words[rank * _WIDTH + _LEFT])

    def recover(self) -> None:
        """Announce that this rank has come to go on without lost ranks, for another time."""
        self.words[self._at + _RECOVERING] += 1

    def not_recovering(self) -> tuple[int, ...]:
        """Return the ranks that have not called :meth:`recover` as often as this one."""
        often = self.words[self._at + _RECOVERING]
        return tuple(r for r in self.ranks if self.words[r * _WIDTH + _RECOVERING] < often)

    def stopped_or_dead(self) -> tuple[str, ...]:
        """Return a text on each rank of the board whose process is stopped, dead or not found."""
        pids = [(r, self.words[r * _WIDTH + _PID]) for r in self.ranks]
        states = [(r, pid, _process_state(pid)) for r, pid in pids]
        return tuple(f"rank {r} is{state} (pid {pid})" for r, pid, state in states if state)

    def describe(self, rank: int) -> str:
        """Return a text on the state of a rank that has not arrived, for the error message."""
        if rank not in self.ranks:
            return f"rank {rank} not arrived (on another node)"
        at = self.words[rank * _WIDTH]
        pid = self.words[rank * _WIDTH + _PID]
        where = f"last at collective #{at}" if at else "at no collective yet"
        if self.has_left(rank):
            where += ", has left"
        return f"rank {rank} not arrived ({where}, pid {pid}{_process_state(pid)})"


_boards: weakref.WeakSet[Board] = weakref.WeakSet()


def _leave() -> None:
    """Announce at exit, on all boards of this process, that their ranks leave."""
    for board in _boards:
        board.leave()


def _process_state(pid: int) -> str:
    """Return " " and the state of a process that is stopped, dead or not found; else ""."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
            state = stat.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return " not on this node, or dead" if os.path.isdir("/proc/self") else ""
    return {"T": " STOPPED", "t": " STOPPED", "Z": " dead", "X": " dead"}.get(state, "")


def private_words(size: int) -> memoryview:
    """Return memory for the words of a board whose ranks are threads of this process."""
    return memoryview(array("q", bytes(bytes_needed(size))))


def bytes_needed(size: int) -> int:
    """Return the length in bytes of a board for `size` ranks."""
    return 8 * _WIDTH * size
