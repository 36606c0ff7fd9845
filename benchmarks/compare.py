"""The published comparison: one command, interleaved launches, medians, tables and targets.

python benchmarks/compare.py                    # all launches, at most 20 minutes
python benchmarks/compare.py --quick            # a trial: one launch, few sizes, 2 minutes
python benchmarks/compare.py --tables-only      # write the tables from the launches on disk

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
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.launching import ROOT, run_missing, say
from benchmarks.plan import FULL, MAIN, QUICK, Launch, plan
from benchmarks.tables import Group, merge, page, without_paths
from mpidist.bench.results import Results

_VENDOR = (
    "import mpi4py; mpi4py.rc.initialize = False\n"
    "from mpi4py import MPI; print(MPI.get_vendor()[0])"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing launches and write the tables; return 1 if any failed or was wrong."""
    options = read_options(arguments)
    scale = QUICK if options.quick else FULL
    if options.launches:
        scale = dataclasses.replace(scale, launches=options.launches)
    vendors = {python: vendor_of(python) for python in options.python}
    launches = plan(vendors, options.ranks, len(os.sched_getaffinity(0)), scale)
    options.runs.mkdir(parents=True, exist_ok=True)
    if not options.tables_only:
        run_missing(launches, options.runs, options.minutes)
    groups = gather(launches, options.runs)
    write_merged(groups, options.runs / "merged")
    write_tables(groups, options.output, scale.launches)
    failed = sum(len(group.failures) for group in groups)
    wrong = sum(cell.wrong for group in groups for cell in group.cells.values())
    say(f"{failed} launches failed, {wrong} figures of wrong results; tables: {options.output}")
    return 1 if failed or wrong else 0


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
        default=[str(ROOT / name / "bin/python") for name in (".venv", ".venv-mpich")],
        help="one Python for each MPI; default: .venv and .venv-mpich",
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--minutes", type=float, default=20.0, help="no launch starts later")
    parser.add_argument("--launches", type=int, help="launches of each configuration; default 5")
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
        failed = folder / f"{launch.name}.failed"
        if failed.exists():
            lines = failed.read_text().splitlines()
            failures.append(f"{launch.name}: {lines[1] if len(lines) > 1 else 'no reason'}")
        path = folder / f"{launch.name}.json"
        if not path.exists():
            continue
        content = json.loads(path.read_text(encoding="utf-8"))
        results = Results.from_json(json.dumps(content["results"]))
        if content["status"] and results.correct:
            failures.append(f"{launch.name}: exit code {content['status']} after all results")
        runs.append((launch.variant.name, results.header, results.rows))
        commits[content["commit"]] = None
        if launch.variant.name == MAIN:
            commands[content["command"]] = None
            headers.append(results.header)
        name = f"{launch.variant.name}, {launch.place}"
        counts[name] = counts.get(name, 0) + 1
    cells = merge(runs)
    return Group(mpi, ranks, cells, headers, list(commands), list(commits), counts, failures)


def rounded(values: dict) -> dict:
    """Return the values with four significant digits: more is noise."""

    def four(value: object) -> object:
        if isinstance(value, list):
            return [four(one) for one in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return {name: four(value) for name, value in values.items()}


def write_tables(groups: Sequence[Group], folder: Path, wanted: int) -> None:
    """Write the tables that the documentation includes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tables.inc").write_text(page(groups, wanted), encoding="utf-8")


def write_merged(groups: Sequence[Group], folder: Path) -> None:
    """Write the merged results of each group as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for group in groups:
        header = dict(group.headers[0]) if group.headers else {}
        for private in ("host", "date", "command", "iterations"):  # of one launch only
            header.pop(private, None)
        header["environment"] = without_paths(header.get("environment", {}))
        content = {
            "title": group.title,
            "header": header,
            "launches": group.launches,
            "commits": group.commits,
            "commands": group.commands,
            "failures": group.failures,
        }
        cells = [
            json.dumps({**dataclasses.asdict(key), **rounded(dataclasses.asdict(cell))})
            for key, cell in group.cells.items()
        ]
        text = json.dumps(content, indent=1)[:-2] + ',\n "cells": [\n  ' + ",\n  ".join(cells)
        path = folder / f"{group.title.lower().replace(', ', '-').replace(' ', '-')}.json"
        path.write_text(text + "\n ]\n}\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
