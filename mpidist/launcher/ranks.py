"""What is known of a rank, and what is reported of it."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..communicator.launcher_notes import SPARE

LOST = "lost"
CODES_COME_AGAIN = 2, 126, 127  # of wrong arguments; of a program that cannot be run, or is absent


def signal_name(number: int) -> str:
    """Return a signal as text, ``9 (SIGKILL)``; real-time signals have no name."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return f"{number}"


@dataclass
class RankState:
    """The last known state of a rank."""

    number: int
    host: str
    # Exit status, negative for a signal.  None before the end, and where nobody reports it; of a
    # lost rank it is `left`, or LOST if that is 0.
    status: int | str | None = None
    mpi: str = ""  # "starting" or "started"; empty before MPI_Init
    left: int | None = None  # exit code that a Python program has announced
    asked: int | None = None  # exit code by which all ranks leave together: StopRequest.leave()
    starved: bool = False  # whether the kernel has killed one of its group for want of memory
    lost: bool = False  # whether its monitor has gone before it reported the exit status
    flight: str = ""  # folder of its flight record, on its host
    still: bool | None = None  # whether that record has not moved for some time; None without one

    @property
    def succeeded(self) -> bool:
        """Whether the rank ended with exit code 0."""
        return self.status == 0

    @property
    def stopped(self) -> bool:
        """Whether the rank ended by an exit code as it had been asked to, which is no failure."""
        return bool(self.asked) and self.status == self.asked

    @property
    def code(self) -> int:
        """The exit code of a rank that has ended; 128 + N for signal N, 1 for a lost rank."""
        if not isinstance(self.status, int):
            return 1
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def killed(self) -> bool:
        """Whether a signal ended the rank, or nobody knows how it ended."""
        return self.status == LOST or (isinstance(self.status, int) and self.status < 0)

    def __str__(self) -> str:
        return f"rank {self.number} on {self.host} {self.how}"

    @property
    def comes_again(self) -> str:
        """What would be the same at each start; "" if that is not sure."""
        early = not self.mpi and self.status in CODES_COME_AGAIN
        return f"exit code {self.status} before MPI_Init" if early else ""

    @property
    def how(self) -> str:
        """How the rank ended."""
        how = f"ended with exit code {self.status}"
        if self.status is None:
            how = "has ended"
        elif self.status == LOST:
            how = (
                "is lost, and so is the process that monitored it: killed by the launcher because "
                "another rank failed, killed by hand, or its node is down"
            )
        elif isinstance(self.status, int) and self.status < 0:
            how = f"was killed by signal {signal_name(-self.status)}"
        if self.starved and self.code == 128 + signal.SIGKILL:
            how += "; as memory ran out, the kernel has killed a process of its control group"
        return how


@dataclass
class Seen:
    """Where a process is: what its flight record, the kernel and its stack say."""

    pid: int
    state: str = ""  # as "S (futex_do_wait)"; empty if there is no such process
    cpu: float = 0  # percent of a core
    memory: int = 0  # bytes
    call: str = ""  # the call that it is in, or the last one; empty without a record
    since: str = ""  # of the call, or of the line that waits
    frames: list[str] = field(default_factory=list)  # of the stack: see Stack
    why: str = ""  # there are no frames
    workers: list[str] = field(default_factory=list)  # its children that use the processor

    @property
    def stopped(self) -> bool:
        """Whether it does not run: stopped by a signal or a debugger, or gone."""
        return self.state[:1] not in ("R", "S", "D", "I")

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        here = self.call.startswith("in ") or self.since.startswith("waiting")
        return here and not self.stopped


def hung(seen: Mapping[int, Seen]) -> list[int]:
    """Return the rank for which all others wait, or the stopped ones; [] if one is not known."""
    train = {rank: one for rank, one in seen.items() if SPARE not in one.call}
    busy = [rank for rank, one in train.items() if not one.waits]
    # A rank whose record could not be read may wait as well.
    known = all(one.state and (one.stopped or one.since) for one in seen.values())
    alone = len(busy) == 1 or all(train[rank].stopped for rank in busy)
    return sorted(busy) if known and alone and len(busy) < len(train) else []


@dataclass
class Report:
    """One message about a rank: any of these facts."""

    rank: int = -1
    host: str = ""
    secret: str = ""  # in the first one of a monitor
    mpi: str | None = None  # as in RankState
    failure: dict[str, str] | None = None  # the exception that ends it: kind, line, text
    exit: int | None = None  # exit code that a Python program announces before its end
    asked: int | None = None  # as in RankState
    status: int | None = None  # exit status, which only a monitor knows
    starved: bool | None = None  # as in RankState, with the status
    flight: str | None = None  # folder of its flight record
    without: list[int] | None = None  # lost ranks, without which it goes on
    late: bool | None = None  # whether it waits for a roll call, as a deadline has passed
    still: bool | None = None  # as in RankState
    seen: Seen | None = None  # the answer to a roll call


class Reports:
    """Where the reports of a job's ranks come from: the supervisor's source of events."""

    complete: ClassVar[bool]  # whether the end of every rank is reported, with its exit status
    logs: str | None = None  # folder for one file of output for each rank
    variables: dict[str, str]  # environment variables of the launcher

    def __init__(self, ranks: int, roll_call: float = 0) -> None:
        self.ranks = ranks
        self.roll_call = roll_call  # seconds after which a record that has not moved is reported
        self._selector = selectors.DefaultSelector()
        self._new: list[tuple[RankState, Report | None]] = []

    def command(self, program: list[str]) -> list[str]:
        """Return the command that the launcher starts for each rank, to run `program`."""
        return program

    def listen(self, seconds: float) -> list[tuple[RankState, Report | None]]:
        """Wait at most `seconds`; return what was reported, by rank, and None at a rank's end."""
        self._read(self._selector.select(0 if self._new else seconds))
        new, self._new = self._new, []
        return new

    def _read(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read from what is ready, and append the reports to `_new`."""
        raise NotImplementedError

    def observe(self, pid: int, rank: RankState | None = None) -> bool:
        """Wake :meth:`listen` at the end of a process, which is that of `rank` if given.

        The kernel tells it by a file descriptor (pidfd_open, where it exists).  Return False if the
        process is gone already.
        """
        try:
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)
        except ProcessLookupError:
            return False
        except (OSError, AttributeError):
            pass
        return True

    def _forget(self, key: selectors.SelectorKey) -> None:
        """Stop to listen to a process that has ended, or to a connection, and close its file."""
        self._selector.unregister(key.fileobj)
        if isinstance(key.fileobj, int):
            os.close(key.fileobj)
        else:
            key.fileobj.close()  # type: ignore[attr-defined]

    def send(self, number: int, rank: int | None = None) -> bool:
        """Send a signal to all ranks, or to one; return False if only the launcher can do that."""
        return False

    def ask(self, launcher: int) -> dict[int, Seen | None]:
        """Ask ranks where they are; return the answers by rank, None for one that will be reported.

        `launcher` is the process that started them.  Ranks that cannot be asked are left out.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            self._forget(key)
        self._selector.close()
