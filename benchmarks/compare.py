"""The published comparison: one command, interleaved launches, medians, tables and targets.

python benchmarks/compare.py                    # all launches, at most 40 minutes
python benchmarks/compare.py --only peers       # those beside other libraries, 10 minutes
python benchmarks/compare.py --quick            # a trial: one launch, few sizes, 3 minutes
python benchmarks/compare.py --tables-only      # write the tables from the launches on disk

There are two comparisons: "bare", mpidist beside the bare mpi4py call inside each launch, and
"peers", beside the strongest of all MPIs and other libraries, each in a job of its own.
Every launch is kept as JSON in .benchmarks, and is not run again; the merged results are written
beside them.  A launch that fails is reported, and is run again the next time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks import strongest
from benchmarks.plan import (
    FULL,
    MAIN,
    PEERS,
    QUICK,
    QUICK_PEERS,
    Launch,
    PeerLaunch,
    Scale,
    plan,
    plan_peers,
)
from benchmarks.tables import Cell, Group, Key, goals, merge, page, without_paths
from mpidist.bench.results import Results, Row
from mpidist.launcher.processes import run_limited

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_LIMIT = 400.0  # seconds after which a launch has failed
INTEL = [str(path) for path in ROOT.glob(".venv-intel/bin/python")]  # where pip finds it
_VENDOR = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print(MPI.get_vendor()[0])"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing launches and write the tables; return 1 if any failed or was wrong."""
    options = read_options(arguments)
    options.runs.mkdir(parents=True, exist_ok=True)
    parts = {"bare": beside_the_bare_call, "peers": beside_peers}
    wanted = [options.only] if options.only else list(parts)
    bad = [parts[part](options) for part in wanted]
    failed, wrong = (sum(column) for column in zip(*bad))
    say(f"{failed} launches failed, {wrong} figures of wrong results; tables: {options.output}")
    return 1 if failed or wrong else 0


def beside_the_bare_call(options: argparse.Namespace) -> tuple[int, int]:
    """Compare mpidist with the bare call; return the numbers of failures and wrong figures."""
    scale = scaled(QUICK if options.quick else FULL, options)
    vendors = {python: vendor_of(python) for python in options.python}
    launches = plan(vendors, options.ranks, len(os.sched_getaffinity(0)), scale)
    if not options.tables_only:
        run_missing(launches, options.runs, options.minutes)
    groups = gather(launches, options.runs)
    write_merged(groups, options.runs / "merged")
    write_tables(groups, options.output, scale.launches)
    wrong = sum(cell.wrong for group in groups for cell in group.cells.values())
    return sum(len(group.failures) for group in groups), wrong


def beside_peers(options: argparse.Namespace) -> tuple[int, int]:
    """Compare mpidist with other libraries; return the numbers of failures and wrong figures."""
    scale = scaled(QUICK_PEERS if options.quick else PEERS, options)
    built = ROOT / ".benchmarks" / "peers"
    libraries, notes = find_libraries(options.python, built)
    launches = plan_peers(options.python, libraries, options.ranks[0], scale, built)
    if not options.tables_only:
        run_missing(launches, options.runs, options.minutes)
    found, alone = gather_peers(launches, options.runs)
    found.notes[:0] = notes
    write_peers(found, alone, options.output, scale.launches)
    if not options.quick:
        page = ROOT / "README.md"
        text = strongest.placed(page.read_text(encoding="utf-8"), strongest.readme(found))
        page.write_text(text, encoding="utf-8")
    return sum(note.startswith("FAILED") for note in found.notes), found.wrong


def scaled(scale: Scale, options: argparse.Namespace) -> Scale:
    """Return a scale with the number of launches of the command line."""
    return dataclasses.replace(scale, launches=options.launches or scale.launches)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--python",
        nargs="+",
        default=[str(ROOT / name / "bin/python") for name in (".venv", ".venv-mpich")] + INTEL,
        help="one Python for each MPI; default: .venv, .venv-mpich, and .venv-intel if it is there",
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="no launch of a comparison starts later"
    )
    parser.add_argument("--launches", type=int, help="launches of each configuration")
    parser.add_argument("--only", choices=("bare", "peers"), help="one of the two comparisons")
    parser.add_argument("--quick", action="store_true", help="one launch, few sizes")
    parser.add_argument("--tables-only", action="store_true", help="launch nothing")
    parser.add_argument("--runs", type=Path, help="folder of the launches and merged results")
    parser.add_argument("--output", type=Path, help="folder of the tables")
    options = parser.parse_args(arguments)
    if options.launches is not None and options.launches < 1:
        parser.error(f"--launches {options.launches}: expected a whole number >= 1")
    if any(n < 2 for n in options.ranks):
        parser.error(f"--ranks {options.ranks}: expected whole numbers >= 2")
    for python in options.python:
        if not Path(python).is_file():
            parser.error(f"--python {python}: no such program: run make venv and make test")
    kept = ROOT / ".benchmarks"
    options.runs = options.runs or kept / ("quick" if options.quick else "full")
    published = kept / "quick-tables" if options.quick else ROOT / "docs" / "benchmarks_data"
    options.output = options.output or published
    return options


def vendor_of(python: str) -> str:
    """Return the vendor of a Python's MPI library."""
    done = subprocess.run([python, "-c", _VENDOR], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SystemExit(f"{python}: mpi4py does not start: {done.stderr.strip()}")
    return done.stdout.strip()


def find_libraries(pythons: Sequence[str], built: Path) -> tuple[dict[str, str], list[str]]:
    """Return the first Python that can run each library, by its name, and what none can run."""
    found: dict[str, str] = {}
    lacks: dict[str, list[str]] = {}
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for python in pythons:
        command = [python, str(ROOT / "benchmarks" / "peers.py"), "--prepare", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=600)
        if done.returncode:
            raise SystemExit(f"{python}: {done.stderr.strip()}")
        for name, reason in json.loads(done.stdout.splitlines()[-1]).items():
            lacks.setdefault(name, []).append(reason)
            if not reason:
                found.setdefault(name, python)
    missing = {name: reasons for name, reasons in lacks.items() if name not in found}
    notes = [f"Left out, {n}: {'; '.join(dict.fromkeys(why))}." for n, why in missing.items()]
    for note in notes:
        say(note)
    return found, notes


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def commit() -> str:
    """Return the commit of the sources."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def run_missing(launches: Sequence[Launch], folder: Path, minutes: float) -> None:
    """Run the launches that are not on disk, until the time is over."""
    missing = [one for one in launches if not (folder / f"{one.name}.json").exists()]
    guess = sum(one.expected_seconds() for one in missing) / 60
    say(
        f"{len(launches)} launches, {len(launches) - len(missing)} on disk; about {guess:.0f} "
        f"minutes for the others, at most {minutes:g}"
    )
    end, source = time.monotonic() + 60 * minutes, commit()
    for k, launch in enumerate(missing):
        left = end - time.monotonic()
        if left < min(launch.expected_seconds(), 30.0):
            say(f"out of time: {len(missing) - k} launches remain")
            return
        begun = time.monotonic()
        ended = run_one(launch, folder, source, min(LAUNCH_LIMIT, left + 30.0))
        seconds = time.monotonic() - begun
        say(f"{k + 1:3}/{len(missing)} {launch.name}: {ended}, {seconds:.0f} s")


def run_one(launch: Launch, folder: Path, source: str, limit: float) -> str:
    """Run one launch; save its results, or its output if it failed; return how it ended."""
    kept, failed = folder / f"{launch.name}.json", folder / f"{launch.name}.failed"
    part = folder / f"{launch.name}.part"
    part.unlink(missing_ok=True)
    words = ["run", "-n", str(launch.ranks), "--", *launch.words()]
    command = [launch.python, "-m", "mpidist", *words, "--json", str(part)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, **launch.variant.settings, "PYTHONPATH": path}
    done = run_limited(command, limit, environ, cwd=ROOT)  # `python -m` looks in cwd first
    ended = f"not finished within {limit:.0f} s" if done.timed_out else f"exit code {done.status}"
    settings = "".join(f"{k}={v} " for k, v in launch.variant.settings.items())
    line = f"{settings}mpidist {' '.join(words)}".replace(f"{ROOT}/", "")
    try:
        results = Results.from_json(part.read_text(encoding="utf-8"))
        part.unlink()
    except (OSError, ValueError) as error:
        failed.write_text(f"{line}\n{ended}; {error}\n{done.output[-4000:]}")
        return f"FAILED, {ended}, see {failed}"
    content = {"command": line, "commit": source, "status": -1 if done.timed_out else done.status}
    content["results"] = json.loads(results.to_json())
    kept.write_text(json.dumps(content) + "\n", encoding="utf-8")
    failed.unlink(missing_ok=True)
    return "done" if results.correct else "WRONG results"


def read_launch(launch: Launch, folder: Path) -> tuple[dict | None, list[str]]:
    """Return what a launch saved, if it did, with its results; and its failures."""
    path, failed = folder / f"{launch.name}.json", folder / f"{launch.name}.failed"
    failures = []
    if failed.exists():
        lines = failed.read_text().splitlines()
        failures.append(f"{launch.name}: {lines[1] if len(lines) > 1 else 'no reason'}")
    if not path.exists():
        return None, failures
    content = json.loads(path.read_text(encoding="utf-8"))
    results = content["results"] = Results.from_json(json.dumps(content["results"]))
    if content["status"] and results.correct:
        failures.append(f"{launch.name}: exit code {content['status']} after all results")
    return content, failures


def gather_peers(
    launches: Sequence[Launch], folder: Path
) -> tuple[strongest.Peers, strongest.Peers]:
    """Read the launches on disk of the comparison with other libraries.

    Return the times that a program sees, and those of the calls alone.
    """
    runs, failures = [], []
    commands: dict[str, None] = {}
    commits: dict[str, None] = {}
    for launch in launches:
        assert isinstance(launch, PeerLaunch)
        content, reasons = read_launch(launch, folder)
        failures += reasons
        if content is not None:
            results = content["results"]
            runs.append((launch.library, results.header, results.rows))
            commands[content["command"]] = commits[content["commit"]] = None
    found = strongest.gathered(runs)
    found.commands, found.commits = commands, commits
    found.notes += [f"FAILED: {failure}" for failure in failures]
    return found, strongest.gathered(runs, alone=True)


def write_peers(found: strongest.Peers, alone: strongest.Peers, folder: Path, wanted: int) -> None:
    """Write the tables of the comparison with other libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "peers.inc").write_text(strongest.summary(found, alone), encoding="utf-8")
    (folder / "peers-tables.inc").write_text(strongest.page(found, wanted), encoding="utf-8")


def gather(launches: Sequence[Launch], folder: Path) -> list[Group]:
    """Read the launches on disk, and merge those of each MPI and number of ranks."""
    groups = []
    for mpi, ranks in dict.fromkeys((one.mpi, one.ranks) for one in launches):
        mine = [one for one in launches if (one.mpi, one.ranks) == (mpi, ranks)]
        groups.append(read_group(mpi, ranks, mine, folder))
    return groups


def read_group(mpi: str, ranks: int, launches: Sequence[Launch], folder: Path) -> Group:
    """Merge the launches of one MPI and number of ranks."""
    runs, headers, failures = [], [], []
    commands: dict[str, None] = {}
    commits: dict[str, None] = {}
    counts: dict[str, int] = {}
    for launch in launches:
        content, reasons = read_launch(launch, folder)
        failures += reasons
        if content is None:
            continue
        results = content["results"]
        runs.append((launch.variant.name, results.header, results.rows))
        commits[content["commit"]] = None
        if launch.variant.name == MAIN:
            commands[content["command"]] = None
            headers.append(results.header)
        name = f"{launch.variant.name}, {launch.place}"
        counts[name] = counts.get(name, 0) + 1
    cells = merge(runs)
    return Group(mpi, ranks, cells, headers, list(commands), list(commits), counts, failures)


def write_tables(groups: Sequence[Group], folder: Path, wanted: int) -> None:
    """Write the tables that the documentation includes, and the goals beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "goals.inc").write_text(goals(groups), encoding="utf-8")
    (folder / "tables.inc").write_text(page(groups, wanted), encoding="utf-8")


def write_merged(groups: Sequence[Group], folder: Path) -> None:
    """Write the merged results of each group, in the JSON form of ``mpidist bench``."""
    folder.mkdir(parents=True, exist_ok=True)
    for group in groups:
        header = dict(group.headers[0]) if group.headers else {}
        for of_one_launch in ("host", "date", "command", "iterations"):
            header.pop(of_one_launch, None)
        header["environment"] = without_paths(header.get("environment", {}))
        for name in ("launches", "commits", "commands", "failures"):
            header[name] = getattr(group, name)
        rows = [_merged_row(key, cell, group.ranks) for key, cell in group.cells.items()]
        name = group.title.lower().replace(", ", "-").replace(" ", "-")
        Results(header, rows, benchmark="published").save(str(folder / f"{name}.json"))


def _merged_row(key: Key, cell: Cell, ranks: int) -> Row:
    candidate = key.algorithm if key.variant == MAIN else f"{key.algorithm}, {key.variant}"
    row = Row(key.collective, candidate, ranks, cell.time_us, cell.ratio, not cell.wrong)
    row.bytes, row.in_place, row.memory = key.bytes, key.in_place, key.memory
    row.figures = {"times_us": cell.times_us, "native_ratio": cell.native_ratio}
    return row


if __name__ == "__main__":
    raise SystemExit(main())
