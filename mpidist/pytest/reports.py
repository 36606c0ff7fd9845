"""One report for all ranks under mpiexec: the ranks tell each other how each test went."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest._code.code import ReprEntryNative, ReprFileLocation, ReprTraceback, TerminalRepr
from _pytest.runner import runtestprotocol

BAD, SKIPPED, PASSED = "failed", "skipped", "passed"
EXPECTED, LEFT = "failed as expected", "left"  # of a rank: the latter as another one had failed
STRICT = "[XPASS(strict)]"  # begins pytest's reason of a failure that was expected and is missed
STACKS = signal.SIGUSR1  # makes a rank show its stacks, wherever it is
FAILED = signal.SIGUSR2  # makes a rank look whether others have left the test that it is in
LOOK = 1.0  # seconds for which it looks
ALONE = 5.0  # seconds that a rank which failed leaves the others, whose failures may say more
# And one that skipped: what a slow rank does before it skips as well may take long.
SKIPS_WITHIN = 60.0


class Missing(Exception):
    """Raised when the values of some ranks do not arrive within the time limit of an exchange."""

    def __init__(self, ranks: list[int], seconds: float):
        self.ranks, self.seconds = ranks, seconds
        super().__init__(f"rank {', '.join(map(str, ranks))} did not come within {seconds:g} s")


class Left(BaseException):
    """Raised in a test that another rank has failed: pytest keeps it for no other test."""


class Exchange:
    """Exchanges values between the ranks by messages on its own communicator, with a time limit.

    `stderr` is the real standard error of the process, even while pytest captures a test's.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.ordinal = 0
        # pytest redirects descriptor 2 while a test runs: keep the real one.
        self.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        faulthandler.register(STACKS, file=self.stderr, all_threads=True)
        self.early: dict[int, Any] = {}  # values of the next exchange, taken before it
        # The same kernel and numbers of processes: containers may share a node's name.
        self.node = os.uname().nodename, os.stat("/proc/self/ns/pid").st_ino
        self.places = self.everyone((self.node, os.getpid()), 60)

    def describe(self) -> str:
        """Return name and version of the MPI library."""
        vendor, version = self.MPI.get_vendor()
        return f"{vendor} {'.'.join(map(str, version))}"

    def everyone(
        self,
        value: object,
        limit: float,
        late: Callable[[list[int]], object] | None = None,
        after: float = ALONE,
    ) -> list[Any]:
        """Exchange a value with all ranks; return all values in rank order.

        Raises `Missing` if values have not come within `limit` seconds.  Before, once `after`
        seconds have passed, ``late(ranks)`` is called with the ranks whose values are missing; and
        after 4 and 16 times as long: what a rank is called out of may be followed by another wait.
        """
        MPI, data = self.MPI, pickle.dumps(value)
        self.ordinal += 1
        tag = self._tag(self.ordinal)
        sends = [self.comm.Isend([data, MPI.BYTE], peer, tag) for peer in self.others]
        got, begin, spins = {**self.early, self.rank: value}, time.monotonic(), 0
        self.early = {}
        while len(got) < self.size or not MPI.Request.Testall(sends):
            came = len(got)
            for peer in self.others:
                if peer not in got:
                    self._take(peer, tag, got)
            missing, passed = [p for p in self.others if p not in got], time.monotonic() - begin
            if passed > limit:
                raise Missing(missing, limit)
            if late is not None and missing and passed > after:
                late(missing)
                after *= 4
            spins = 0 if len(got) > came else spins + 1
            if spins < 200:
                os.sched_yield()
            else:
                time.sleep(0.0002)
        return [got[rank] for rank in range(self.size)]

    def look(self) -> dict[int, Any]:
        """Return the values that have come for the next exchange, by rank."""
        for peer in self.others:
            if peer not in self.early:
                self._take(peer, self._tag(self.ordinal + 1), self.early)
        return self.early

    def call(self, ranks: Sequence[int], number: signal.Signals) -> None:
        """Send a signal to those of these ranks that are on this node and handle it."""
        for peer in ranks:
            node, pid = self.places[peer]
            if node == self.node and _catches(pid, number):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    @staticmethod
    def _tag(ordinal: int) -> int:
        return ordinal % 32749  # below the smallest upper bound that MPI promises

    def _take(self, peer: int, tag: int, got: dict[int, Any]) -> None:
        status = self.MPI.Status()
        if self.comm.Iprobe(peer, tag, status):  # not Improbe: see backends/mpi_messages.py
            data = bytearray(status.Get_count(self.MPI.BYTE))
            self.comm.Recv([data, self.MPI.BYTE], peer, tag)
            got[peer] = pickle.loads(data)

    def reports_for_all(self, missing: list[int]) -> bool:
        """Return whether this rank is to report for all: the lowest that is not in `missing`."""
        return all(rank in missing for rank in range(self.rank))

    def give_up(self, why: str, missing: list[int]) -> None:
        """Write the reason and the stacks of the missing ranks of this node; end all ranks."""
        if not self.reports_for_all(missing):
            time.sleep(10)  # the rank that reports ends this one too
        self.stderr.write(f"\nrank {self.rank}: {why}\n")
        for peer in missing:
            node, pid = self.places[peer]
            if node != self.node:
                continue
            self.stderr.write(f"rank {self.rank}: the stacks of rank {peer} (process {pid}):\n")
            time.sleep(0.2)  # for mpiexec to pass this on before them
            try:
                os.kill(pid, STACKS)
            except ProcessLookupError:
                self.stderr.write(f"rank {self.rank}: process {pid} is no more\n")
            time.sleep(0.5)
        time.sleep(0.5)  # for mpiexec to pass on what was written
        if "MPI_LOCALNRANKS" in os.environ:  # MPICH's mpiexec: see MpiBackend.abort
            os.kill(os.getpid(), signal.SIGKILL)
        self.MPI.COMM_WORLD.Abort(70)


def _catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal; a test may have reset it to ending the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (number - 1) & 1)


LONGEST_TEXT = 20_000  # characters of one rank's traceback


@dataclass
class Verdict:
    """The outcome of a test on one rank, with reason and traceback.

    It has passed, failed, failed as expected, been skipped, or been left as another rank failed.
    """

    outcome: str
    message: str = ""  # one line
    text: str = ""  # the traceback
    started: bool = False  # whether the rank has a default communicator


class RankFailures(TerminalRepr):
    """The text that pytest prints for a failed test: each different failure with its ranks.

    `failures` has (title with the ranks, message, traceback), see :func:`together_by_message`.
    """

    def __init__(self, nodeid: str, failures: list[tuple[str, str, str]]):
        self.failures = failures
        summary = "; ".join(f"{who}: {message}" for who, message, _ in failures)
        self.reprcrash = ReprFileLocation(nodeid, 0, summary)
        # What pytest-xdist sends from its worker, and another process prints.
        lines = [f"{who}: {message}\n{text}\n" for who, message, text in failures]
        self.reprtraceback = ReprTraceback([ReprEntryNative(lines)], None, "native")
        self.sections: list[tuple[str, str, str]] = []

    def toterminal(self, tw: Any) -> None:
        """Write each failure to pytest's terminal writer."""
        for who, message, text in self.failures:
            tw.line(f"{who}: {message}", red=True, bold=True)
            tw.line(text)


class RankReports:
    """Hooks of pytest for a run under mpiexec: each test has one outcome for all ranks.

    This rank waits for the others `grace` seconds beyond the time limit of a test, which is `limit`
    where pytest-timeout has none.  ``abort(why)`` is called, on the rank that reports, before the
    job is aborted.  `failures` counts the tests that failed on any rank, also as expected;
    `running` is the last one.
    """

    def __init__(
        self,
        exchange: Exchange,
        grace: float,
        abort: Callable[[str], object] = lambda why: None,
        limit: float = 600.0,
    ):
        self.exchange, self.grace, self.abort, self.limit = exchange, grace, abort, limit
        self.failures, self.running = 0, ""
        self._anew = False  # whether a test has failed since the default communicator was made
        self.collect_errors: list[str] = []
        self._phase = self._left = ""  # of a test: that which runs, and the first that was left
        signal.signal(signal.SIGTERM, self.ended)
        signal.signal(FAILED, self.leave)

    def ended(self, number: int, _: FrameType | None) -> None:
        """Handle SIGTERM: write which test was running, then end this rank by the signal.

        The launcher sends it after the death of another rank.
        """
        where = f" in {self.running}" if self.running else ""
        self.exchange.stderr.write(f"rank {self.exchange.rank}: ended by the launcher{where}\n")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def leave(self, *_: object) -> None:
        """Handle FAILED: leave the test's code if another rank has failed or skipped that test."""
        phase = self._phase
        if not phase:
            return
        # The signal may be late, of the test before: only a verdict on this one counts.  It has
        # been sent, but MPI may have to be asked a few times until it is there.
        until = time.monotonic() + LOOK
        while time.monotonic() < until:
            found = [verdict.outcome for verdict in self.exchange.look().values()]
            if any(outcome not in (PASSED, LEFT) for outcome in found):
                self._left = self._left or phase
                why = "another rank has failed or skipped this test"
                # Only after a failure of its own pytest does the rest of a teardown.
                if phase == "teardown":
                    pytest.fail(why)
                raise Left(why)
            time.sleep(0.001)

    def _within(self, phase: str) -> Generator[None, Any, Any]:
        """Let a phase of a test be left while it runs: not the code of pytest around it."""
        self._phase = phase
        try:
            return (yield)
        finally:
            self._phase = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Make the default communicator anew after a failure, and note that a setup runs."""
        if self._anew:
            self._anew = False
            renew()
        return (yield from self._within("setup"))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, Any, Any]:
        """Let a fixture whose setup was left be set up anew by the next test."""
        try:
            return (yield)
        except Left:
            # Without a result its end would do nothing.
            fixturedef.cached_result = None, fixturedef.cache_key(request), None  # type: ignore
            fixturedef.finish(request)  # type: ignore[arg-type]
            raise

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note that the code of a test runs."""
        return (yield from self._within("call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note that the teardown of a test runs."""
        return (yield from self._within("teardown"))

    def together(
        self,
        value: object,
        limit: float,
        what: str,
        late: Callable[[list[int]], object] | None = None,
        after: float = ALONE,
    ) -> list[Any]:
        """Return the values that all ranks pass to this call, in rank order.

        If some are missing after `limit` seconds, it ends the job with "rank N did not come … to
        the end of `what`".
        """
        try:
            return self.exchange.everyone(value, limit, late, after)
        except Missing as missing:
            why = f"{missing} to the end of {what}; the launch is aborted"
            if self.exchange.reports_for_all(missing.ranks):
                self.abort(why)
            self.exchange.give_up(why, missing.ranks)
            raise

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record the error of a test file that cannot be imported, for the ranks' comparison."""
        if report.failed:
            self.collect_errors.append(f"{report.nodeid}: {report.longreprtext}"[-LONGEST_TEXT:])

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Check that all ranks have found the same tests: else they would wait for each other."""
        names = "\n".join(item.nodeid for item in session.items)
        mine = (zlib.crc32(names.encode()), len(session.items), "\n".join(self.collect_errors))
        ranks = self.together(mine, 120, "the collection")
        for rank, other in enumerate(ranks):
            if other != ranks[0]:
                pytest.exit(
                    f"rank {rank} found other tests than rank 0: {other[1]} tests, "
                    f"not {ranks[0][1]}\n{ranks[0][2]}\n{other[2]}",
                    returncode=4,
                )

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_timeout_set_timer(self, settings: Any) -> None:
        """Record the time limit that pytest-timeout sets for a test: the ranks wait as long."""
        self.limit = settings.timeout

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        """Run a test on this rank, and report its outcome on all ranks."""
        hook, self.running = item.ihook, item.nodeid
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        watch = threading.Timer(self.limit + 2 * self.grace, self.stuck, [item.nodeid])
        watch.daemon = True
        watch.start()
        self._left = ""
        signal.signal(FAILED, self.leave)  # again: a test before may have set another handler
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        watch.cancel()
        if item.config.pluginmanager.hasplugin("timeout"):
            hook.pytest_timeout_cancel_timer(item=item)  # below this rank waits for others
        # A rank that was called out of the test has only the failures that it had before.
        left = [report.when for report in reports].index(self._left) if self._left else None
        mine = verdict_of(reports[:left])
        if left is not None:
            mine = Verdict(LEFT) if mine.outcome == PASSED else mine
            for report in reports[left:]:
                _pass(report)
        mine.started = is_started()
        late = partial(self.exchange.call, number=FAILED)
        calls = mine.outcome not in (PASSED, LEFT)
        after = SKIPS_WITHIN if mine.outcome == SKIPPED else ALONE
        limit = self.limit + self.grace
        verdicts = self.together(mine, limit, item.nodeid, late if calls else None, after)
        merge(item.nodeid, reports, verdicts)
        if any(verdict.outcome not in (PASSED, SKIPPED) for verdict in verdicts):
            self.failures += 1
            self._anew = all(verdict.started for verdict in verdicts)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def stuck(self, nodeid: str) -> None:
        """End the job: this rank is still in the test long after its time limit.

        A timer calls it.  It is for tests in which all ranks hang: a rank that has come to the end
        of the test ends the job earlier, in :meth:`together`.
        """
        time.sleep(10 * self.exchange.rank)  # rank 0 reports, if it can
        why = f"no rank came to the end of {nodeid}; the launch is aborted"
        self.abort(why)
        self.exchange.give_up(why, list(range(self.exchange.size)))

    def pytest_internalerror(self, excrepr: object) -> None:
        """End the job after an error in pytest itself: the other ranks would wait for this one."""
        if "Missing" not in str(excrepr):
            self.exchange.stderr.write(f"{excrepr}\n")
            self.exchange.give_up("an error in pytest itself; the launch is aborted", [])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Set the exit status to 0 except on rank 0: mpiexec would end it before it reports."""
        if self.exchange.rank:
            session.exitstatus = 0

    def pytest_unconfigure(self) -> None:
        """Wait until rank 0 has reported; an alarm ends this rank after 30 s in MPI_Finalize."""
        self.together(None, 60, "the session")
        if self._anew:
            renew()  # a broken one would end the job
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)


def is_started() -> bool:
    """Return whether this rank has a default communicator; tests need not use mpidist."""
    launch = sys.modules.get("mpidist.communicator.launch")
    return launch is not None and launch.started() is not None


def renew() -> None:
    """Let another communicator be the default one; collective.

    A failed test may have left the ranks at different collectives, even where nothing is broken.
    """
    from mpi4py import MPI

    from ..communicator.launch import init, take_place

    take_place(init(comm=MPI.COMM_WORLD))


def outcome_of(report: Any) -> tuple[str, str]:
    """Return (outcome, one-line reason) of a report of pytest; an expected failure is "skipped"."""
    if hasattr(report, "wasxfail") and report.skipped:
        return SKIPPED, f"expected failure: {report.wasxfail}"
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash else report.longreprtext.strip().rpartition("\n")[2]
        return BAD, text.partition("\n")[0]
    if report.skipped:
        longrepr = report.longrepr
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        return SKIPPED, reason.removeprefix("Skipped: ")
    return PASSED, ""


def verdict_of(reports: Sequence[pytest.TestReport]) -> Verdict:
    """Return the verdict of a test from the reports of its setup, call and teardown.

    Failed goes before skipped, and skipped before passed.
    """
    verdict = Verdict(PASSED)
    for report in reports:
        outcome, reason = outcome_of(report)
        if outcome == BAD:
            text = f"[{report.when}]\n{report.longreprtext}"[-LONGEST_TEXT:]
            return Verdict(outcome, reason, text + captured(report))
        if outcome == SKIPPED:
            expected = hasattr(report, "wasxfail")
            verdict = Verdict(EXPECTED, report.wasxfail) if expected else Verdict(SKIPPED, reason)
    return verdict


def captured(report: pytest.TestReport) -> str:
    """Return the last 4000 characters of each captured section (stdout, stderr, log)."""
    return "".join(f"\n--- {name}\n{text[-4000:]}" for name, text in report.sections if text)


def merge(nodeid: str, reports: Sequence[Any], verdicts: list[Verdict]) -> None:
    """Mark the test as failed in this rank's reports if it failed on any rank, with all failures.

    `verdicts` are those of all ranks.  A test that some ranks skipped and others ran fails too.  An
    expected failure may be that of any rank.
    """
    by_outcome: dict[str, list[int]] = {}
    expected = any(verdict.outcome == EXPECTED for verdict in verdicts)
    for rank, verdict in enumerate(verdicts):
        if expected and verdict.outcome == BAD and verdict.message.startswith(STRICT):
            verdict.outcome = PASSED
        by_outcome.setdefault(verdict.outcome, []).append(rank)
    failures = together_by_message(verdicts)
    skipped = by_outcome.pop(SKIPPED, [])
    ran = sorted(rank for ranks in by_outcome.values() for rank in ranks)
    if skipped and ran and not failures:
        verdict = verdicts[skipped[0]]
        verdict.outcome = BAD
        failures = [(f"skipped on {named(skipped)} but not on {named(ran)}", verdict.message, "")]
    if not failures and not expected:
        return
    own = [report for report in reports if report.failed]
    report = (own or [r for r in reports if r.when == "call"] or reports)[0]
    if failures:
        report.outcome = BAD
        report.longrepr = RankFailures(nodeid, failures)
        report.sections = []  # each failure brings its own
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        return
    first = next(verdict for verdict in verdicts if verdict.outcome == EXPECTED)
    for each in own:  # passed against expectation
        _pass(each)
    report.outcome, report.wasxfail = SKIPPED, first.message


def _pass(report: Any) -> None:
    """Let a report be that of a phase that has passed."""
    report.outcome, report.longrepr = PASSED, None
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def together_by_message(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    """Group the failed verdicts, one per rank, by message.

    Returns a list of (title with the ranks, message, traceback on the first of them).
    """
    groups: dict[str, list[int]] = {}
    for rank, verdict in enumerate(verdicts):
        if verdict.outcome == "failed":
            groups.setdefault(verdict.message, []).append(rank)
    return [
        (f"failed on {named(ranks)}", message, verdicts[ranks[0]].text)
        for message, ranks in groups.items()
    ]


def named(ranks: list[int]) -> str:
    """Return a list of ranks as text: ``"rank 3"``, ``"ranks 0, 2"``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def silence(config: pytest.Config, log: str | None) -> None:
    """Redirect pytest's terminal output of this rank to the file `log`, or discard it if None."""
    # Not by taking the reporter away: other plugins write to it.
    config.get_terminal_writer()._file = open(log or os.devnull, "w", buffering=1)  # noqa: SIM115
