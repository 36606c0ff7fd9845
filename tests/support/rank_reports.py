"""pytest in every rank, one report: a test that fails on any rank fails, and rank 0 says where.

After each test the ranks tell each other how it went.  A rank that does not come in time ends the
launch, with its stacks and its number; every other failure lets the later tests go on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from dataclasses import dataclass

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest.runner import runtestprotocol

from tests.support.rank_exchange import Exchange, Missing
from tests.support.results import outcome_of

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
