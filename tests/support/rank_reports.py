"""pytest in every rank, one report: a test that fails on any rank fails, and rank 0 says where.

After each test the ranks tell each other how it went.  A rank that does not come in time ends the
launch, with its stacks and its number; every other failure lets the later tests go on.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import zlib
from dataclasses import dataclass

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest.runner import runtestprotocol

from tests.support.results import outcome_of

STACKS = signal.SIGUSR1  # makes a rank show its stacks, wherever it is


class Missing(Exception):
    """Some ranks did not come in time."""

    def __init__(self, ranks: list[int], seconds: float):
        self.ranks, self.seconds = ranks, seconds
        super().__init__(f"rank {', '.join(map(str, ranks))} did not come within {seconds:g} s")


class Exchange:
    """The duplicate of COMM_WORLD, and what is known of the other ranks."""

    def __init__(self):
        from mpi4py import MPI

        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        self.others = [peer for peer in range(self.size) if peer != self.rank]
        self.ordinal = 0
        # pytest redirects descriptor 2 while a test runs: keep the real one.
        self.stderr = os.fdopen(os.dup(sys.__stderr__.fileno()), "w", buffering=1)
        faulthandler.register(STACKS, file=self.stderr, all_threads=True)
        self.places = self.everyone((os.uname().nodename, os.getpid()), 60)

    def describe(self) -> str:
        vendor, version = self.MPI.get_vendor()
        return f"{vendor} {'.'.join(map(str, version))}"

    def everyone(self, value: object, limit: float) -> list:
        """Give `value`, get those of all ranks in rank order; after `limit` s raise `Missing`."""
        MPI, data = self.MPI, pickle.dumps(value)
        self.ordinal += 1
        tag = self.ordinal % 32749  # below the smallest upper bound that MPI promises
        sends = [self.comm.Isend([data, MPI.BYTE], peer, tag) for peer in self.others]
        got, begin, spins = {self.rank: value}, time.monotonic(), 0
        while len(got) < self.size or not MPI.Request.Testall(sends):
            came = len(got)
            for peer in self.others:
                if peer not in got:
                    self._take(peer, tag, got)
            if time.monotonic() - begin > limit:
                raise Missing([p for p in self.others if p not in got], limit)
            spins = 0 if len(got) > came else spins + 1
            if spins < 200:
                os.sched_yield()
            else:
                time.sleep(0.0002)
        return [got[rank] for rank in range(self.size)]

    def _take(self, peer: int, tag: int, got: dict) -> None:
        status = self.MPI.Status()
        message = self.comm.Improbe(peer, tag, status)
        if message is not None:
            data = bytearray(status.Get_count(self.MPI.BYTE))
            message.Recv([data, self.MPI.BYTE])
            got[peer] = pickle.loads(data)

    def speaks(self, missing: list[int]) -> bool:
        """Whether this rank is the lowest of those that are there."""
        return all(rank in missing for rank in range(self.rank))

    def give_up(self, why: str, missing: list[int]) -> None:
        """Say why, let the missing ranks show their stacks, and end the job on all ranks."""
        if not self.speaks(missing):
            time.sleep(10)  # the one that speaks ends this rank too
        self.stderr.write(f"\nrank {self.rank}: {why}\n")
        for peer in missing:
            node, pid = self.places[peer]
            if node != os.uname().nodename:
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


LONGEST_TEXT = 20_000  # characters of one rank's traceback


@dataclass
class Verdict:
    """How a test went on one rank."""

    outcome: str
    message: str = ""  # one line
    text: str = ""  # the traceback


class RankFailures(TerminalRepr):
    """What pytest prints of a test that failed: each different failure once, with its ranks."""

    def __init__(self, nodeid: str, failures: list[tuple[str, str, str]]):
        self.failures = failures
        summary = "; ".join(f"{who}: {message}" for who, message, _ in failures)
        self.reprcrash = ReprFileLocation(nodeid, 0, summary)

    def toterminal(self, tw) -> None:
        for who, message, text in self.failures:
            tw.line(f"{who}: {message}", red=True, bold=True)
            tw.line(text)


class RankReports:
    """The pytest plugin of a run under mpiexec.

    Parameters
    ----------
    grace : float
        Seconds that the others are waited for beyond the time limit of the test.
    abort : callable
        Told the reason before the job is aborted.
    """

    def __init__(self, exchange: Exchange, grace: float, abort):
        self.exchange, self.grace, self.abort = exchange, grace, abort
        self.limit = 600.0  # of the test that runs; pytest-timeout knows it
        self.failures = 0  # tests that failed on any rank
        self.collect_errors: list[str] = []

    def together(self, value, limit: float, what: str) -> list:
        try:
            return self.exchange.everyone(value, limit)
        except Missing as missing:
            why = f"{missing} to the end of {what}; the launch is aborted"
            if self.exchange.speaks(missing.ranks):
                self.abort(why)
            self.exchange.give_up(why, missing.ranks)
            raise

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors.append(f"{report.nodeid}: {report.longreprtext}"[-LONGEST_TEXT:])

    def pytest_collection_finish(self, session):
        """All ranks must have found the same tests, or they would wait for each other in vain."""
        names = "\n".join(item.nodeid for item in session.items)
        mine = (zlib.crc32(names.encode()), len(session.items), "\n".join(self.collect_errors))
        ranks = self.together(mine, 120, "the collection")
        for rank, other in enumerate(ranks):
            if other != ranks[0]:
                pytest.exit(
                    f"rank {rank} found other tests than rank 0: {other[1]}, not {ranks[0][1]}"
                    f"\n{ranks[0][2]}\n{other[2]}",
                    returncode=4,
                )

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, settings):
        self.limit = settings.timeout

    def pytest_runtest_protocol(self, item, nextitem):
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        watch = threading.Timer(self.limit + 2 * self.grace, self.stuck, [item.nodeid])
        watch.daemon = True
        watch.start()
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        watch.cancel()
        hook.pytest_timeout_cancel_timer(item=item)  # what is waited for below is not this rank
        verdicts = self.together(verdict_of(reports), self.limit + self.grace, item.nodeid)
        merge(item.nodeid, reports, verdicts)
        self.failures += any(verdict.outcome == "failed" for verdict in verdicts)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def stuck(self, nodeid):
        """Called where not one rank came to the end: then none waits for the others."""
        time.sleep(10 * self.exchange.rank)  # rank 0 speaks, if it can
        why = f"no rank came to the end of {nodeid}; the launch is aborted"
        self.abort(why)
        self.exchange.give_up(why, list(range(self.exchange.size)))

    def pytest_internalerror(self, excrepr):
        """A rank that leaves like this would be waited for by the others."""
        if "Missing" not in str(excrepr):
            self.exchange.stderr.write(f"{excrepr}\n")
            self.exchange.give_up("an error in pytest itself; the launch is aborted", [])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session):
        """Only rank 0 leaves with a bad status: else mpiexec ends the job before its report."""
        if self.exchange.rank:
            session.exitstatus = 0

    def pytest_unconfigure(self):
        """Leave when rank 0 has reported; where MPI cannot finalize, the kernel ends this rank."""
        self.together(None, 60, "the session")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(30)


def verdict_of(reports) -> Verdict:
    """The worst of setup, call and teardown."""
    verdict = Verdict("passed")
    for report in reports:
        outcome, reason = outcome_of(report)
        if outcome == "failed":
            text = f"[{report.when}]\n{report.longreprtext}"[-LONGEST_TEXT:]
            return Verdict(outcome, reason, text + captured(report))
        if outcome == "skipped":
            verdict = Verdict(outcome, reason)
    return verdict


def captured(report) -> str:
    """What the test printed, the end of it."""
    return "".join(f"\n--- {name}\n{text[-4000:]}" for name, text in report.sections if text)


def merge(nodeid: str, reports: list, verdicts: list[Verdict]) -> None:
    """Make the reports of this rank tell what happened on all of them."""
    failures = together_by_message(verdicts)
    ran = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == "passed"]
    skipped = [rank for rank, verdict in enumerate(verdicts) if verdict.outcome == "skipped"]
    if skipped and ran and not failures:
        verdict = verdicts[skipped[0]]
        verdict.outcome = "failed"
        failures = [(f"skipped on {named(skipped)} but not on {named(ran)}", verdict.message, "")]
    if not failures:
        return
    own = [report for report in reports if report.failed]
    report = (own or [r for r in reports if r.when == "call"] or reports)[0]
    report.outcome = "failed"
    report.longrepr = RankFailures(nodeid, failures)
    report.sections = []  # each failure brings its own
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def together_by_message(verdicts: list[Verdict]) -> list[tuple[str, str, str]]:
    groups: dict[str, list[int]] = {}
    for rank, verdict in enumerate(verdicts):
        if verdict.outcome == "failed":
            groups.setdefault(verdict.message, []).append(rank)
    return [
        (f"failed on {named(ranks)}", message, verdicts[ranks[0]].text)
        for message, ranks in groups.items()
    ]


def named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def silence(config, log: str | None) -> None:
    """Send what pytest prints on this rank to the file `log`, or nowhere."""
    # Not by taking the reporter away: other plugins write to it.
    config.get_terminal_writer()._file = open(log or os.devnull, "w", buffering=1)  # noqa: SIM115
