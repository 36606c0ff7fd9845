"""Run the tests in every launch, and print one line for each in the end.

    python tests/launch.py                          # all of them
    python tests/launch.py --short                  # some, without the tests marked long
    python tests/launch.py --rest                   # what is to follow --short in CI
    python tests/launch.py serial openmpi-3         # some
    python tests/launch.py openmpi-2 -- -k ring -x  # arguments for pytest
    python tests/launch.py mpich-3-stress           # random sequences; -onecore: all ranks on one
    python tests/launch.py mpich-3-stress-nodes     # each rank pretends to be on a node of its own
    python tests/launch.py slurm                    # real jobs on emulated nodes, where Slurm is
    python tests/launch.py mpi-2 --python PYTHON    # whichever MPI that one has (tests/mpis.py)

Tests of the serial launch run two at a time for each core (--workers), for many of them wait for
processes and deadlines; those that need the machine for themselves run after them.  Slurm's, which
wait for its daemons most of the time, run beside those under mpiexec.  How a file is run stands in
its name (`kind_of` in tests/conftest.py).

It says first how long this takes: what each launch took here the last time, or else what it took
on 2 cores with nothing beside it (tests/launch_seconds.json); and at each launch what is left.

A launch has failed if a test failed, if it crashed, hung or ran no test, or if a test was skipped
for a reason that tests/allowed_skips.txt does not name.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":  # in place of the folder of this file
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tests.support.processes import Finished, descendants, environment, mpiexec, run
from tests.support.results import Results

HERE = Path(__file__).resolve().parent
ALLOWED_SKIPS = HERE / "allowed_skips.txt"
SECONDS = "launch_seconds.json"
ALL = ["serial", "alone", *(f"openmpi-{n}" for n in (1, 2, 3, 4, 5)), "mpich-2", "mpich-3"]
ALL += ["openmpi-4-stress", "openmpi-3-stress-onecore", "openmpi-3-stress-nodes", "slurm"]
SHORT = ["serial", "openmpi-2", "openmpi-4", "mpich-2", "openmpi-3-stress-onecore"]
REST = [x for x in ALL if x != "openmpi-3-stress-onecore"]  # of which SHORT leaves out nothing
NAMES = r"serial|alone|slurm|(openmpi|mpich|mpi)-[1-9]\d*(-stress(-onecore|-nodes)?)?"
ONE_PROCESS = ("serial", "alone", "slurm")  # the launches without an mpiexec
VENDORS = {"openmpi": "Open MPI", "mpich": "MPICH", "mpi": "MPI"}


@dataclass
class Launch:
    """One run of pytest, in one process or on several ranks, and what came of it."""

    name: str
    results: Results = field(default_factory=Results)
    finished: Finished | None = None
    refused: list[str] = field(default_factory=list)  # reasons of skips that are not allowed

    @property
    def mpi(self) -> str:
        return self.name.partition("-")[0]

    @property
    def ranks(self) -> int:
        return int((self.name.split("-") + ["0"])[1])

    @property
    def kind(self) -> str:
        """The tests of the launch, for pytest's --kind."""
        if self.name in ONE_PROCESS:
            return self.name
        return "stress" if "-stress" in self.name else "mpi,cuda"

    @property
    def one_core(self) -> bool:
        return self.name.endswith("-onecore")

    @property
    def nodes(self) -> bool:
        return self.name.endswith("-nodes")

    def trouble(self) -> str:
        """What went wrong apart from failed tests, or nothing."""
        results, finished = self.results, self.finished
        where = f" in {' and '.join(results.running)}" if results.running else ""
        if finished is not None and finished.timed_out:
            # Ranks that were stopped may wake up at the end of it, and give up on each other.
            return f"timed out{where}" + f"; {results.aborted}" * bool(results.aborted)
        if results.aborted:
            return results.aborted
        if finished is None:
            return "was not run"
        if not results.ended:
            return f"crashed (status {finished.status}){where}"
        if not results.passed and not results.failed and not results.skipped:
            return "ran no test"
        if finished.status and not results.failed:
            return f"status {finished.status}"
        return f"skipped for a reason not allowed: {'; '.join(self.refused)}" * bool(self.refused)

    def failures(self) -> int:
        return len(self.results.failed) + bool(self.trouble())

    def line(self) -> str:
        """One line of the closing table."""
        results, seconds = self.results, self.finished.seconds if self.finished else 0
        title = VENDORS.get(self.mpi, self.name) if not self.ranks else results.mpi
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}" if self.ranks else ""
        counts = (
            f"{results.passed:5} passed {len(results.failed):4} failed "
            f"{sum(results.skipped.values()):4} skipped {seconds:5.0f} s"
        )
        where = ", all ranks on one core" * self.one_core + ", a node for each rank" * self.nodes
        notes = ["stress" + where] * (self.kind == "stress")
        notes += [f"FAILED: {self.trouble()}"] if self.trouble() else []
        notes += [f"{count} x {reason}" for reason, count in sorted(results.skipped.items())]
        title = title or VENDORS[self.mpi]
        return f"{title:16} {ranks:8} {counts}  {'; '.join(notes)}".rstrip()


def perform(launch: Launch, options, folder: Path, beside: bool = False) -> None:
    """Run one launch; its lines are shown as they come, at its end if beside others, and kept."""
    jsonl = folder / f"{launch.name}.jsonl"
    chosen = [f"--kind={options.kind or launch.kind}", *(options.paths or ["tests"])]
    if options.short or (options.rest and launch.ranks and launch.name not in SHORT):
        chosen += ["-m", "not long"]
    elif options.rest and launch.name in SHORT:
        chosen += ["-m", "long or docs"]
    program = ["-m", "pytest", f"--results={jsonl}", *chosen]
    python = str(Path(options.mpich_python if launch.mpi == "mpich" else options.python).absolute())
    if launch.ranks:  # which would race for pytest's cache; and prterun gives rank 0 a terminal
        program += ["-p", "no:cacheprovider", "--color=no"]
        if launch.kind == "stress":  # one long test: no stacks half-way, but its own closing line
            program += ["-o", "faulthandler_timeout=0", "-s"]
        command = mpiexec(launch.ranks, *program, python=python)
        if launch.one_core:
            command = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), *command]
    else:
        if launch.kind == "serial" and options.workers > 1:
            program += ["-n", str(options.workers), "--dist", "worksteal"]
        if os.environ.get("MPIDIST_TEST_SLURM") == "long":  # a test may wait for minutes
            program += ["-o", "faulthandler_timeout=300"]
        command = [python, *program]
    command += options.pytest
    title = f"\n=== {launch.name}: {shlex.join(command)}"
    print(title + ": its lines follow at its end" * beside, flush=True)
    with open(folder / f"{launch.name}.log", "w", encoding="utf-8") as log:

        def show(line):
            line = line.replace("\0", "")  # prterun writes some
            log.write(line)
            if not beside:
                print(line, end="", flush=True)

        alone = {"MPIDIST_RANKS_PER_NODE": "1"} if launch.nodes else {}
        finished = run(command, patience(jsonl, options.limit), environment(**alone), on_line=show)
    if beside:
        print(title, finished.output, sep="\n", flush=True)
    launch.results = Results.read(jsonl)
    launch.refused = refused(launch.results.skipped)
    launch.finished = finished


def patience(path: Path, limit: float) -> Callable[[], float]:
    """Return what gives the seconds that a launch has left: `limit` since a test began or ended.

    The whole takes ten times as long on a loaded machine; a hang shows in no new line of `path`.
    """
    begun = time.time()

    def left() -> float:
        last = path.stat().st_mtime if path.exists() else begun
        return max(last, begun) + limit - time.time()

    return left


def refused(reasons) -> list[str]:
    """Return the reasons that the list of allowed skips does not name."""
    lines = ALLOWED_SKIPS.read_text(encoding="utf-8").splitlines()
    allowed = [line for line in lines if line and not line.startswith("#")]
    return sorted(r for r in reasons if not any(fnmatch.fnmatchcase(r, a) for a in allowed))


def summary(launches: list[Launch]) -> str:
    """The tests that failed, one line per launch, and the totals alone on the last line."""
    lines = [""]
    for launch in launches:
        lines += [f"{launch.name}: failed: {test}" for test in launch.results.failed]
    lines += ["", *(launch.line() for launch in launches)]
    passed = sum(launch.results.passed for launch in launches)
    failed = sum(launch.failures() for launch in launches)
    skipped = sum(sum(launch.results.skipped.values()) for launch in launches)
    return "\n".join([*lines, f"{passed} passed, {failed} failed, {skipped} skipped"]) + "\n"


class Progress:
    """How long the launches take, told at the start and at each of them.

    Only of whole launches: with --path or arguments for pytest nothing is known, and nothing kept.
    """

    def __init__(self, names: list[str], options: argparse.Namespace, folder: Path):
        self.names, self.begun = names, time.monotonic()
        self.whole = not (options.paths or options.kind or options.pytest)
        self.measured = json.loads((HERE / SECONDS).read_text(encoding="utf-8"))
        self.total = "short" if options.short else "rest" if options.rest else "all"
        self.default = {"short": SHORT, "rest": REST, "all": ALL}[self.total]
        self.last = last = folder / (SECONDS if self.total == "all" else f"{self.total}_{SECONDS}")
        self.here = json.loads(last.read_text(encoding="utf-8")) if last.exists() else {}

    def left(self, names: list[str]) -> str:
        """About how long these launches, the last of all, will take; nothing if it is not known."""
        known = {**self.measured, **self.here}
        if self.whole and set(names) <= set(known):
            return minutes(sum(known[name] for name in names))
        if self.whole and self.names == [name for name in self.default if name != "slurm"]:
            return minutes(max(60, known[self.total] - (time.monotonic() - self.begun)))
        return ""

    def at_start(self) -> str:
        count = f"{len(self.names)} launch{'es' * (len(self.names) != 1)}: {' '.join(self.names)}"
        if not (left := self.left(self.names)):
            return count
        here = all(name in self.here for name in self.names)
        basis = "as the last time here" if here else "measured on 2 cores with nothing beside"
        return f"{count}\nThis takes about {left} ({basis})."

    def at(self, name: str) -> str:
        """The line before a launch."""
        place = self.names.index(name)
        passed = minutes(time.monotonic() - self.begun)
        left = self.left(self.names[place:])
        return (
            f"--- launch {place + 1} of {len(self.names)}, {name}; {passed} since the start"
            + f", about {left} left" * bool(left)
        )

    def keep(self, launches: list[Launch]) -> None:
        """Keep what whole launches without trouble took, for the next time."""
        if self.whole:
            ended = (x for x in launches if x.finished and not x.trouble())
            self.here.update({x.name: round(x.finished.seconds) for x in ended})
        self.last.write_text(json.dumps(self.here, indent=1) + "\n", encoding="utf-8")


def minutes(seconds: float) -> str:
    """Of a duration: seconds below two minutes, else minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line; what follows "--" is for pytest."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "launches", nargs="*", help=f"of {' '.join(ALL)} (default: all), or more ranks"
    )
    parser.add_argument("--python", default=".venv/bin/python", help="the one with Open MPI")
    parser.add_argument("--mpich-python", default=".venv-mpich/bin/python")
    parser.add_argument(
        "--limit", type=float, default=1000, help="seconds in which a test must begin or end"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(4, 2 * len(os.sched_getaffinity(0))),
        help="serial tests at a time (default: two for each core, at most 4)",
    )
    parser.add_argument("--results", default=".test", help="folder for the logs and the summary")
    parser.add_argument(
        "--path", action="append", dest="paths", help="files and folders instead of all tests"
    )
    part = parser.add_mutually_exclusive_group()
    part.add_argument(
        "--short",
        action="store_true",
        help=f"without the tests marked long; by default in {' '.join(SHORT)}",
    )
    part.add_argument(
        "--rest",
        action="store_true",
        help="of the launches of --short the tests that it leaves out, of others with ranks those "
        f"that it would choose; by default in {' '.join(REST)}",
    )
    parser.add_argument("--kind", help="of tests, instead of the launch's own: cuda, for instance")
    options = parser.parse_args(arguments[:cut])
    default = SHORT if options.short else REST if options.rest else ALL
    options.launches = options.launches or list(default)
    options.pytest = arguments[cut + 1 :]
    for name in options.launches:
        if not re.fullmatch(NAMES, name):
            parser.error(
                f"no launch is called {name!r}: serial, alone, slurm, openmpi-N, mpich-N and mpi-N "
                "are, and with -stress, -stress-onecore or -stress-nodes behind"
            )
    return options


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the launches too
    options = parse(arguments)
    folder = Path(options.results)
    # Slurm's runs beside those under mpiexec, and is no further step.
    progress = Progress(
        [x for x in options.launches if x != "slurm" or len(options.launches) == 1], options, folder
    )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(progress.at_start(), flush=True)
    launches = [Launch(name) for name in options.launches]
    slurm = [x for x in launches if x.name == "slurm" and any(other.ranks for other in launches)]
    beside = [threading.Thread(target=perform, args=(x, options, folder, True)) for x in slurm]
    try:
        for launch in [x for x in launches if x not in slurm]:
            for thread in beside:
                if launch.ranks and thread.ident is None:
                    thread.start()
            if launch.name in progress.names:
                print("\n" + progress.at(launch.name), flush=True)
            perform(launch, options, folder)
            done = [x for x in launches if x.finished]
            (folder / "summary.txt").write_text(summary(done), encoding="utf-8")
            progress.keep(done)
    except BaseException:
        for pid, _ in descendants(os.getpid())[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    for thread in beside:
        thread.join()
    (folder / "summary.txt").write_text(summary(launches), encoding="utf-8")
    print(summary(launches), end="")
    return 1 if any(launch.failures() for launch in launches) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
