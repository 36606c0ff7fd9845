"""What a run of pytest leaves for the launcher: one line of JSON for every test begun and ended.

Written as it happens, so that a launch which crashes or hangs still tells how far it came.  The
launcher reads it without pytest: nothing outside the standard library is imported here.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

BAD, SKIPPED, PASSED = "failed", "skipped", "passed"


class Recorder:
    """A pytest plugin that writes the lines; several processes may add to `path`."""

    def __init__(self, path: str, mpi: str):
        from mpidist.pytest import outcome_of  # not for the launcher, which has no pytest

        self.outcome_of = outcome_of
        self.file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self.outcomes: dict[str, tuple[str, str]] = {}
        self.begun: dict[str, float] = {}
        self.write(event="begin", mpi=mpi)

    def write(self, **record):
        self.file.write(json.dumps(record) + "\n")

    @staticmethod
    def add(path: str, **record) -> None:
        """Add one line to the file of another process."""
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def pytest_runtest_logstart(self, nodeid):
        self.begun[nodeid] = time.monotonic()
        self.write(event="start", test=nodeid)

    def pytest_runtest_logreport(self, report):
        outcome, reason = self.outcome_of(report)
        worst, _ = self.outcomes.setdefault(report.nodeid, (PASSED, ""))
        if worst == PASSED or outcome == BAD:
            self.outcomes[report.nodeid] = outcome, reason

    def pytest_runtest_logfinish(self, nodeid):
        """Also for a test that never began, as its worker crashed before."""
        outcome, reason = self.outcomes.pop(nodeid, (BAD, "no report"))
        seconds = round(time.monotonic() - self.begun.pop(nodeid, time.monotonic()), 3)
        self.write(event="test", test=nodeid, outcome=outcome, reason=reason, seconds=seconds)

    def pytest_collectreport(self, report):
        """A file that cannot be imported, or that skips itself as a whole."""
        outcome, reason = self.outcome_of(report)
        if outcome != PASSED:
            self.write(event="test", test=report.nodeid, outcome=outcome, reason=reason)

    def pytest_sessionfinish(self, exitstatus):
        for nodeid in list(self.outcomes):  # of a worker that crashed
            self.pytest_runtest_logfinish(nodeid)
        self.write(event="end", status=int(exitstatus))


@dataclass
class Results:
    """The lines of one run, counted."""

    mpi: str = ""
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter = field(default_factory=Counter)
    running: list[str] = field(default_factory=list)  # tests that were begun and did not end
    ended: bool = False
    aborted: str = ""  # why the ranks gave up

    @classmethod
    def read(cls, path: Path) -> Results:
        results = cls()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            try:
                results.take(json.loads(line))
            except ValueError:
                continue  # cut short by a kill
        return results

    def take(self, record: dict) -> None:
        event = record["event"]
        if event == "begin":
            self.mpi = record["mpi"]
        elif event == "start":
            self.running.append(record["test"])
        elif event == "abort":
            self.aborted = record["reason"]
        elif event == "end":
            self.ended = True
        else:
            if record["test"] in self.running:  # and not a file that skips itself
                self.running.remove(record["test"])
            if record["outcome"] == PASSED:
                self.passed += 1
            elif record["outcome"] == SKIPPED:
                self.skipped[record["reason"]] += 1
            else:
                self.failed.append(f"{record['test']}: {record['reason']}")
