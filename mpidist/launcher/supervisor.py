"""A running job: one supervisor of the launcher and its ranks, which decides the exit code."""

from __future__ import annotations

import contextlib
import ctypes
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIGKILL, SIGQUIT, SIGTERM, pthread_sigmask
from typing import TYPE_CHECKING

from ..communicator.failure import FULL_TRACEBACK
from ..communicator.launcher_notes import ROLL_CALL_WITHIN, STARTED, STARTING
from ..errors import CollectiveTimeout, InvalidArgument, LaunchError
from ..measure import counted
from .boxes import SHOWN_WITHIN, Boxes, write_fully
from .failures import INTERRUPT, Failure, Failures, ranks_listed
from .mpi import say
from .notes import explain
from .processes import end_processes, remove_session_files
from .rank_process import PR_SET_PDEATHSIG
from .ranks import LOST, RankState, Report, Reports, Seen, hung
from .signals import TO_LAUNCHER, TO_RANKS, Signals, by_terminal

if TYPE_CHECKING:
    from .flight import Job

PATIENCE = 8.0  # seconds that the launcher has to end a job after a rank failed
STEP = 3.0  # seconds between SIGTERM to ranks, SIGKILL to ranks, SIGTERM, SIGKILL to the launcher
CAUSE_WITHIN = 1.0  # seconds after a lost rank in which the rank that caused it may report
LAST_REPORTS, AFTER_FAILURE = 5.0, 0.5  # seconds for reports after the launcher has ended
ENDS_WITHIN = 30.0  # seconds that the launcher has to end after all ranks succeeded
STARTED_WITHIN = 60.0  # seconds after which missing ranks are reported
MPI_WITHIN = 120.0  # seconds that MPI_Init may take after the last rank has entered it
ANSWERS_WITHIN = 10.0  # seconds for the answers to a roll call: a full machine may take some
LATE_WITHIN = ROLL_CALL_WITHIN - 0.1  # after a missed deadline: before its rank ends the job
NOT_ENDED = "the launcher has not ended the job within {:g} s: ending it"
STAYS = "all ranks ended {:g} s ago, but the launcher still runs: ending it"


@contextlib.contextmanager
def started(
    command: Sequence[str],
    environ: Mapping[str, str],
    boxes: Boxes,
    preexec: Callable[[], object] | None = None,
    stdin: int | None = None,
) -> Iterator[subprocess.Popen]:
    """Yield the started launcher; if it outlives the ``with`` block, end it and its ranks.

    `boxes` copies its output, and with ``MPIDIST_FULL_TRACEBACK`` holds nothing back.
    """
    # A terminal sends SIGQUIT to the launcher too, and it asks mpidist run.  Blocked, which is
    # inherited, and not ignored: Hydra sets a handler.
    before = pthread_sigmask(SIG_BLOCK, (SIGQUIT,))
    try:
        launcher = subprocess.Popen(
            command,
            env=environ,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            preexec_fn=preexec,
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} cannot be started: {error.strerror or error}") from error
    finally:
        pthread_sigmask(SIG_SETMASK, before)
    try:
        boxes.copy(launcher, environ.get(FULL_TRACEBACK, "") in ("", "0"))
        yield launcher
    finally:
        if launcher.poll() is None:
            end_processes(launcher, environ=environ)
        remove_session_files(launcher.pid, environ)
        boxes.wait()
        boxes.show()


def end_with_parent() -> None:
    """Have the kernel end the launcher if ``mpidist run`` is killed; called in the new process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGTERM)


@dataclass
class RollCall:
    """A roll call that is going on."""

    why: str
    late: bool  # whether a deadline has passed, and the job ends
    begun: float
    answers: dict[int, Seen | None]  # by rank; None before the answer
    until: float = math.inf  # for the answers

    def __post_init__(self) -> None:
        self.until = self.begun + (LATE_WITHIN if self.late else ANSWERS_WITHIN)


@dataclass
class Supervisor:
    """Runs a launcher, and learns from the reports of its ranks who failed first, and how.

    The reports are of monitors (connections.py), and then complete: the supervisor knows the end of
    every rank, and ends a job whose launcher does not.  Or they are notes of the programs
    themselves (notes.py): then the launcher ends the job, and its exit code is the job's.
    """

    reports: Reports
    # Seconds from a SIGTERM of SLURM to its SIGKILL (KillWait), within which the job must end.
    kill_wait: float | None = None
    signals: Signals = field(default_factory=Signals)  # that this process has received already
    start_timeout: float = MPI_WITHIN  # for MPI_Init, after the last rank has entered it
    limit: float | None = None  # seconds after which the job is ended
    survive: bool = False  # the others go on when a rank is lost
    kill_hung: bool = False  # a rank for which all others wait, after a roll call
    stdin: int | None = None  # of the launcher, as of `subprocess`; None for that of this process
    write: Callable[[int, bytes], object] = write_fully  # the output: see Boxes
    known: dict[int, RankState] = field(default_factory=dict)  # in the order of their first reports
    ended: list[RankState] = field(default_factory=list)  # in the order of their ends
    late: bool = False  # whether the job was ended because of `limit`
    interrupted: int = 0  # the first signal to end the job; 0 for none
    passed: set[int] = field(default_factory=set)  # signals that the ranks were sent
    told: str = ""  # how the rank that failed first did so, when that is known

    def __post_init__(self) -> None:
        self.ranks = self.reports.ranks
        self.failures, self._boxes = Failures(self.ranks), Boxes(self.write)
        self._last_mpi_report = self._begun = time.monotonic()
        # Since `_over` the job should end; from `_deadline` on `_acts`, one a step, end it.
        self._over = self._deadline = math.inf
        self._step, self._why = STEP, ""
        self._acts: list[Callable[[], object]] = []
        self._reported = self._reported_missing = self._stuck_at_start = False
        self._told_why = False  # by an exception
        self._told_after = 0  # exceptions that were printed before
        self._roll: RollCall | None = None  # the one that is going on
        self._told_roll = self._told_still = False
        self._without: list[RankState] = []  # lost ranks, without which the others went on
        self._survived: set[int] = set()  # those of which the others said so

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run the launcher; return the exit code of the job: 0 if launcher and ranks succeeded.

        Otherwise it is that of the first rank that failed, or else of the launcher; 128 + N for
        signal N.
        """
        environ = {**environ, **self.reports.variables}
        # Where there are monitors, they end the ranks.
        preexec = None if self.reports.complete else end_with_parent
        try:
            with self.signals.recorded(*TO_LAUNCHER):  # those for the ranks: see run_job
                with started(command, environ, self._boxes, preexec, self.stdin) as self._launcher:
                    code = self._verdict(self._wait()) or int(bool(self._boxes.lost))
            # Also where a rank ended without Python's end, which removes them.
            if code == 0 and not self._without:
                from .flight import discard  # here: mpidist run --help starts fast

                for folder in self._flights:
                    discard(folder)
            return code
        finally:
            self.reports.close()

    def _wait(self) -> int:
        """Handle signals and reports until the launcher ends; return its status (-N for signal N).

        It then waits for the last reports of monitors, for 5 s or, after a failure, 0.5 s.
        """
        self.reports.observe(self._launcher.pid)
        self._begun = time.monotonic()
        while self._launcher.poll() is None:
            # Reports and the launcher's end wake it at once; signals and deadlines have no file.
            left = self._roll.until - time.monotonic() if self._roll is not None else 0.2
            self._listen(min(max(left, 0.0), 0.2))
            for number in self.signals.pending():
                self._pass(number)
            self.failures.print_settled()
            self._boxes.show(SHOWN_WITHIN)
            self._call_if_still()
            self._print_roll()
            self._end_if_late()
            if self.reports.complete:
                self._report_missing()
                self._end_if_mpi_does_not_start()
            self._end_if_over()
        # What the ranks sent before the launcher's end, and came since the last look.
        self._listen(0)
        status = self._launcher.returncode
        # A launcher may end before the last words of monitors have come over the network; after a
        # failure it may have killed them, and then nothing comes.
        until = time.monotonic() + (LAST_REPORTS if status == 0 else AFTER_FAILURE)
        while self.reports.complete and not self._all_ended and time.monotonic() < until:
            self._listen(0.1)
        self._print_roll(last=True)
        self._boxes.wait()
        return status

    # -- the ranks --------------------------------------------------------------------------------

    @property
    def _all_ended(self) -> bool:
        return len(self.ended) >= self.ranks

    def _listen(self, seconds: float) -> None:
        """Wait at most `seconds` for reports, and handle them."""
        for rank, report in self.reports.listen(seconds):
            self.known[rank.number] = rank
            if report is None:
                self._end(rank, None)
            else:
                self._take(rank, report)

    def _take(self, rank: RankState, report: Report) -> None:
        if report.mpi is not None:
            rank.mpi, self._last_mpi_report = report.mpi, time.monotonic()
        if report.flight is not None:
            rank.flight = report.flight
        if report.failure is not None:
            with contextlib.suppress(KeyError):  # not the description of an exception
                self.failures.add(rank.number, rank.host, report.failure)
                timeout = report.failure["kind"] == CollectiveTimeout.__name__
                report.late = report.late or timeout
        if report.late and not self._told_roll:  # its process waits for a second
            self._call_roll(f"a deadline has passed on rank {rank.number}", late=True)
        if report.still is not None:
            rank.still = report.still
        if report.seen is not None and self._roll is not None:
            self._roll.answers[rank.number] = report.seen
        rank.starved = rank.starved or bool(report.starved)
        if report.asked is not None:
            rank.asked = report.asked
        if report.without is not None:
            self._survived.update(report.without)
        if report.exit is not None:
            rank.left = report.exit
        if report.status is not None:
            self._end(rank, report.status)

    def _end(self, rank: RankState, status: int | None) -> None:
        """Handle the end of a rank; its status is None if nobody reports it."""
        if rank.status is not None:
            return
        if status is None and self.reports.complete:
            # Its monitor has gone without a word: what the program announced is all there is.
            rank.lost, rank.status = True, rank.left or LOST
        else:
            rank.status = rank.left if status is None else status
        self.ended.append(rank)
        if not rank.mpi:  # it will not enter MPI_Init any more
            self._last_mpi_report = time.monotonic()
        good = rank.succeeded or rank.stopped
        lost = not good and self._others_go_on(rank)
        if lost:
            self._print_flight(rank)
            self._without.append(rank)
            say(f"{rank}; the others go on")
        if not (good or lost) and self.reports.complete:
            # The launcher should end the others, but Hydra does not see a rank that just exits.
            self._should_end(PATIENCE, NOT_ENDED)
            # A lost rank is more often a victim than the cause: that has CAUSE_WITHIN to report.
            if rank.status != LOST:
                self._report()
        elif self._all_ended:
            good = all(r.succeeded or r.stopped or r in self._without for r in self.ended)
            self._should_end(ENDS_WITHIN if good else PATIENCE, STAYS)

    def _others_go_on(self, rank: RankState) -> bool:
        """Return whether a rank that failed is lost, and the job is not at its end because of it.

        It is once a rank fails by an exception: that may be all ranks', and ends the job.
        """
        at_its_end = self.failures.known or self.interrupted or self._over < math.inf
        # Its monitor may report the end behind those of the others, who know better.
        goes_on = rank.number in self._survived or not (at_its_end or self._all_ended)
        return self.survive and rank.mpi == STARTED and goes_on

    @property
    def _went_on(self) -> bool:
        """Whether ranks were lost, and all others have ended well."""
        others = [rank for rank in self.ended if rank not in self._without]
        good = bool(others) and all(rank.succeeded for rank in others)
        return bool(self._without) and good and self._all_ended and not self.interrupted

    # -- signals, and jobs that do not end by themselves ------------------------------------------

    def _pass(self, number: int) -> None:
        """Forward a received signal: SIGUSR1 and SIGUSR2 to the ranks, others to the launcher.

        A Ctrl-C is not forwarded if the terminal has sent it to the launcher too.  SIGQUIT asks for
        a roll call.
        """
        if number == SIGQUIT:
            self._call_roll("asked for")
            return
        self.passed.add(number)
        if number in TO_RANKS and self.reports.send(number):
            return
        if not by_terminal(number):
            self._launcher.send_signal(number)
        if number in TO_RANKS:
            return
        self.interrupted = self.interrupted or number
        if self.reports.complete:
            within = PATIENCE
            if self.kill_wait is not None:  # finish in about half of the time until SIGKILL
                within = min(PATIENCE, self.kill_wait / 4)
                self._step = min(STEP, self.kill_wait / 10)
            self._should_end(within, NOT_ENDED)

    def _should_end(self, within: float, why: str = "") -> None:
        """End the job if its launcher has not ended it within some seconds; then print `why`."""
        now = time.monotonic()
        self._over = min(self._over, now)
        # The earliest deadline counts; acts that have begun are not begun anew.
        if now + within < self._deadline and not self._acts:
            self._deadline, self._why = now + within, why.format(within)

    def _end_if_over(self) -> None:
        """End the job step by step, from the deadline on.

        Ranks that are left get SIGTERM, then SIGKILL; then the launcher gets both.
        """
        # Each act only if the launcher still runs, and the last one again and again::
        #
        #     _over            _deadline        + _step          + 2 _step        + 3 _step
        #     |-- its turn ----|----------------|----------------|----------------|- - - - -
        #                      SIGTERM, ranks   SIGKILL, ranks   SIGTERM, it      SIGKILL, it
        #
        # Without monitors, or ranks that are left, it is only the last two.
        now = time.monotonic()
        # Where ranks were lost before, a child of one of them may keep the launcher from its end.
        if self.reports.complete and now > self._over + CAUSE_WITHIN and not self._went_on:
            self._report()
        if now < self._deadline:
            return
        if not self._acts:
            if self._why:
                say(self._why)
            if self.reports.complete and not self._all_ended:
                self._acts = [partial(self.reports.send, n) for n in (SIGTERM, SIGKILL)]
            self._acts += [self._launcher.terminate, self._launcher.kill]
        (self._acts.pop(0) if len(self._acts) > 1 else self._acts[0])()
        self._deadline = now + self._step

    def _end_if_late(self) -> None:
        """End the job once, `limit` seconds after its start; how its ranks end then is no news."""
        if self.limit is None or self.late or time.monotonic() < self._begun + self.limit:
            return
        self.late = self._reported = self._boxes.told = True
        self._should_end(0)

    def _report_missing(self) -> None:
        """Print once, 60 s after the start, how many ranks have started, if some have not."""
        if self._reported_missing or time.monotonic() < self._begun + STARTED_WITHIN:
            return
        self._reported_missing = True
        if len(self.known) < self.ranks:
            say(f"{len(self.known)} of {self.ranks} ranks have started: waiting")

    def _end_if_mpi_does_not_start(self) -> None:
        """End the job if no rank is left to enter MPI_Init, but some do not return from it."""
        now = time.monotonic()
        if now > self._over or now < self._last_mpi_report + self.start_timeout:
            return
        ranks = self.known.values()
        starting = sorted(rank.number for rank in ranks if rank.mpi == STARTING)
        absent = [rank for rank in self.ended if not rank.mpi]
        entered = sum(bool(rank.mpi) for rank in ranks)
        # Every rank is in MPI_Init, or came out, or has ended before it: nobody is left to come.
        if starting and entered + len(absent) == self.ranks:
            self._stuck_at_start = self._reported = self._boxes.told = True
            self._should_end(0)
            others = ", ".join(f"rank {rank.number}" for rank in absent[1:4])
            why = f"{absent[0]} before MPI_Init{others and f', as {others}'}; " if absent else ""
            say(
                f"{why}{len(starting)} of {self.ranks} ranks ({listed(starting)}) have been in "
                f"MPI_Init for {self.start_timeout:g} s (--start-timeout): ending the job"
            )

    @property
    def never_started(self) -> bool:
        """Whether MPI_Init failed: no rank returned from it, and it hung or a rank failed in it.

        That rank is the first that failed.  False if a signal, such as Ctrl-C, ended the job, or if
        a rank ended well without it: then the program is at fault.  Only monitors tell it.
        """
        ranks = self.known.values()
        through = any(rank.mpi == STARTED or rank.succeeded for rank in ranks)
        failed = self._failed()
        stuck = self._stuck_at_start or bool(failed and failed[0].mpi == STARTING)
        return self.reports.complete and stuck and not through and not self.interrupted

    # -- the roll call ----------------------------------------------------------------------------

    def _call_if_still(self) -> None:
        """Call the roll, once, when no flight record has moved for some time."""
        states = [each.still for each in self.known.values() if each.status is None]
        ends = self.failures.known or self._over < math.inf
        still = True in states and False not in states and not ends
        if still and not self._told_still:
            self._call_roll(f"no rank has moved for {self.reports.roll_call:g} s")
        self._told_still = still

    def _call_roll(self, why: str, late: bool = False) -> None:
        """Ask every rank where it is, unless that was asked just now."""
        begun = time.monotonic()
        if self._roll is not None:
            if late and not self._roll.late:  # its answers are as good, but there is less time
                self._roll.late, self._roll.until = True, min(self._roll.until, begun + LATE_WITHIN)
            return
        try:
            self._roll = RollCall(why, late, begun, self.reports.ask(self._launcher.pid))
        except Exception as error:  # the job goes on
            say(f"roll call: {type(error).__name__}: {error}")

    def _print_roll(self, last: bool = False) -> None:
        """Print where the ranks are, when all that were asked have answered or ended.

        Also when 10 s have passed, or 0.9 s after a missed deadline, or no more comes (`last`).
        """
        roll = self._roll
        if roll is None:
            return
        open_ = [rank for rank, seen in roll.answers.items() if seen is None]
        open_ = [rank for rank in open_ if self._not_ended(rank)]
        if open_ and not last and time.monotonic() < roll.until:
            return
        took = time.monotonic() - roll.begun
        self._roll = None
        from .roll_call import lines  # here: mpidist run --help starts fast

        say(f"roll call of {counted(self.ranks, 'rank')}: {roll.why}")
        for job in self._jobs({}):
            for line in job.divergences():
                say(line)
        for line in lines({r: seen for r, seen in roll.answers.items() if seen}, self._hosts):
            self._told_roll = self._told_roll or roll.late
            say(line)
        absent: dict[str, list[int]] = {}
        for rank in range(self.ranks):
            if roll.answers.get(rank) is None:
                state = self.known.get(rank)
                why = "not asked: it has not started, or runs on another node without a monitor"
                if state is not None and not self._not_ended(rank):
                    why = state.how
                elif rank in roll.answers:
                    why = f"its monitor has not answered within {took:.1f} s"
                absent.setdefault(why, []).append(rank)
        for why, ranks in absent.items():
            say(f"{ranks_listed(ranks)}: {why}")
        if self.kill_hung and self._told_still and not roll.late:
            self._kill_hung({r: seen for r, seen in roll.answers.items() if seen})

    def _kill_hung(self, seen: Mapping[int, Seen]) -> None:
        """Kill the rank for which all others wait; none if a rank has not said where it is."""
        if all(rank in seen for rank in range(self.ranks) if self._not_ended(rank)):
            for rank in hung(seen):
                say(f"rank {rank}: all others wait for it (--hang-kill): killing it")
                self.reports.send(SIGKILL, rank)

    def _not_ended(self, rank: int) -> bool:
        return all(each.number != rank for each in self.ended)

    # -- the exit code ----------------------------------------------------------------------------

    def _failed(self) -> list[RankState]:
        """Return the ranks that are known to have failed, lost ones last, else as they ended.

        First those that were asked to stop: without the ranks lost before, the job had gone on.
        """
        ranks = [*self.ended, *self.known.values()]  # some twice
        failed = [rank for rank in ranks if rank.status not in (None, 0)]
        return sorted(failed, key=lambda rank: (not rank.stopped, rank.status == LOST))

    @property
    def stopped(self) -> bool:
        """Whether the ranks ended because they were asked to."""
        return any(rank.stopped for rank in self.ended)

    @property
    def cause(self) -> Failure | RankState | None:
        """The exception or the rank that failed first; None if none is known to have failed."""
        cause = self.failures.cause(self.known.values())
        return cause or next(iter(self._failed()), None)

    def _report(self, last: bool = False) -> None:
        """Print once which rank failed first.

        If a rank reported an exception, this is printed at the end only (`last`).  A rank with an
        exit status is preferred to one that was lost.
        """
        if self._reported:
            return
        failed = self._failed()
        cause = self.failures.cause(self.known.values())
        if not (last if cause is not None else failed):
            return
        self._reported = True
        self._told_why = cause is not None
        self.failures.print()
        cause = cause or failed[0]
        self.told, self._told_after = str(cause), self.failures.printed
        if not self.reports.complete and len(self.known) < self.ranks:
            # A rank of another host, which cannot send notes, may have been the first.
            self.told = self.told.replace(" failed first: ", " failed: ", 1)
        self._print_flight(cause)
        self._boxes.told = self._told_why or failed[0].status != LOST
        self._boxes.show()
        # The name is that of rank_process.py, which imports nothing of this package.
        logs = self.reports.logs
        say(f"{self.told}; its log: {logs}/rank-{cause.number:05d}.log" if logs else self.told)

    @property
    def _flights(self) -> list[Path]:
        """Folders of the flight records: one, unless the program started MPI several times."""
        return [Path(each) for each in sorted({r.flight for r in self.known.values() if r.flight})]

    def _print_flight(self, cause: Failure | RankState) -> None:
        """Print what the flight records say, if a rank was lost or an operation did not end."""
        if self.interrupted:
            return
        lost = {cause.number: cause.how} if isinstance(cause, RankState) else {}
        for job in self._jobs(lost):
            if isinstance(cause, Failure):
                tells = cause.kind == CollectiveTimeout.__name__
            else:
                # The exit code may stand for a signal that the launcher has seen.  Of one that is
                # only the launcher's nobody knows the rank: that may have followed another one.
                tells = cause.killed or job.crashed(None if cause.left is None else cause.number)
            for line in job.few_lines(without_places=self._told_roll) if tells else ():
                say(line)

    @property
    def _hosts(self) -> dict[int, str]:
        return {each.number: each.host for each in self.known.values()}

    def _jobs(self, ended: Mapping[int, str]) -> Iterator[Job]:
        """Yield the flight records on this node, one job for each time that MPI was started.

        They leave out the ranks that were lost before: what became of these has been told.
        """
        from .flight import Job  # here: mpidist run --help starts fast

        without = {rank.number for rank in self._without} - set(ended)
        for folder in self._flights:
            with contextlib.suppress(InvalidArgument):  # its ranks are on other nodes
                yield Job(folder, ended, self._hosts, without)

    def _verdict(self, status: int) -> int:
        """Return the exit code of the job, given the launcher's `status`; print what failed.

        By the reports of monitors it is that of the first rank that failed; else that of the
        launcher, or 1 if a rank has not reported its end.
        """
        code = status if status >= 0 else 128 - status
        if self._acts and self.ended and self._all_ended:  # only the launcher did not end by itself
            code = next((rank.code for rank in self.ended if not rank.succeeded), 0)
        self.failures.print()
        if self.told and self.failures.printed > self._told_after:
            say(self.told)  # it is the last line also where another rank's traceback came late
        if self._stuck_at_start or self.late:
            return 1
        if self._went_on:
            lost = "; ".join(map(str, self._without))
            say(f"finished on {self.ranks - len(self._without)} of {self.ranks} ranks: {lost}")
            return 0
        if not self.reports.complete:
            return self._verdict_of_launcher(code)
        self._report(last=True)
        failed = self._failed()
        first = next((rank for rank in self.ended if not rank.succeeded), None)
        # Lost ranks have been ended together by the launcher; any other may have ended the rest.
        if first and first is not failed[0] and not self._told_why | (first.lost & failed[0].lost):
            say(f"before that {first}")
        codes = [rank for rank in failed if isinstance(rank.status, int) and rank.status > 0]
        told = {None if first is None else first.status, failed[0].status} if failed else ()
        other = next((rank for rank in codes if rank.status not in told), None)
        if other is not None and not self._told_why:
            say(f"and {other}")  # perhaps the cause: a rank that it ended may have reported first
        if failed and (failed[0].status != LOST or status == 0):
            return self._code(failed[0].code)
        absent = sorted(set(range(self.ranks)) - {rank.number for rank in self.ended})
        if code or not absent:
            return code
        say(
            f"the launcher ended with exit code 0, but of {self.ranks} ranks {listed(absent)} did "
            "not report: never started, or unable to reach this host"
        )
        return 1

    def _verdict_of_launcher(self, code: int) -> int:
        """Return the exit code of a job whose launcher has ended with `code`, by its notes."""
        for rank in self.known.values():
            if rank.status is None:
                rank.status = rank.left
        if code and not self.interrupted:
            explain(code, self.ended, list(self.known.values()), bool(self.failures.known))
        if code:
            self._report(last=True)
            code = self._code(code)
        return code

    def _code(self, code: int) -> int:
        """Return the exit code of a job that failed with `code`; 1 for an exception.

        A rank of MPICH ends by SIGTERM after an exception: see ``MpiBackend.abort``.
        """
        cause = self.failures.cause(self.known.values())
        if self.interrupted or cause is None:
            return code
        if isinstance(cause, RankState):
            return cause.code
        # An exception that follows another rank's failure decides only if the rank that failed
        # first told one too: otherwise that rank's exit code is the better one.
        failed = {failure.number for failure in self.failures.known}
        told = all(rank.number in failed for rank in self._failed()[:1])
        return 1 if cause.kind != INTERRUPT and (told or not cause.follows) else code


def listed(numbers: Sequence[int]) -> str:
    """Return the first ranks as a comma-separated list, with an ellipsis if there are more."""
    return ", ".join(map(str, numbers[:8])) + ", …" * (len(numbers) > 8)
