"""Run torch's own tests of torch.distributed for a backend: ``suite.py mpidist 3 [pattern]``.

They come with PyTorch (``torch.testing._internal.distributed.distributed_test``; its utilities need
``expecttest``).  Prints a line for each failed test, and the counts; ``--json`` writes all results,
``--check`` exits with 1 if a test failed that suite_failures.json does not explain.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.support.processes import environment, mpiexec, run

JOB = Path(__file__).resolve().with_name("suite_job.py")
FAILURES = Path(__file__).with_name("suite_failures.json")  # reason: names of tests
# Of GPUs, of other backends, and of libraries that are not there.
ELSEWHERE = re.compile("cuda|nccl|gpu|SyncBatchNorm|torchvision|mixed_backend", re.IGNORECASE)


def names(folder, backend="gloo"):
    """Return the names of torch's tests that are meant for a CPU."""
    finished = run(mpiexec(1, str(JOB), backend, str(folder), "--list"), 120, environment())
    found = sorted(set(re.findall(r"^test_\w+$", finished.output, re.MULTILINE)))
    return [name for name in found if not ELSEWHERE.search(name)]


def results(backend, ranks, tests, folder, limit=75, say=lambda text: None):
    """Run tests on some ranks; return {name: (result, message)} with pass, skip or fail."""
    folder = Path(folder)
    left = list(tests)
    while left:
        listed = folder / "tests.txt"
        listed.write_text("\n".join(left))
        for path in [*folder.glob("store_*"), *folder.glob("barrier/*")]:
            path.unlink()
        run(
            mpiexec(ranks, str(JOB), backend, str(folder), str(listed)),
            limit * len(left) + 60,
            environment(SUITE_LIMIT=str(limit)),
        )
        before, left = left, [name for name in left if not any(folder.glob(f"{name}.[0-9]"))]
        if len(left) == len(before):  # the first one ended all ranks without a word
            (folder / f"{left[0]}.0").write_text(json.dumps(["crash", ""]))
            left = left[1:]
        say(f"{len(left)} left")
    return {name: _together(folder, name, ranks) for name in tests}


def failed(found):
    """Return the names of the failed tests."""
    return [name for name, (kind, _) in found.items() if kind == "fail"]


def explained():
    """Return the names of tests that may fail, by the reason."""
    return json.loads(FAILURES.read_text())


def _together(folder, name, ranks):
    each = []
    for rank in range(ranks):
        path = folder / f"{name}.{rank}"
        each.append(json.loads(path.read_text()) if path.exists() else ["none", ""])
    kinds = {kind for kind, _ in each}
    for kind in ("timeout", "crash", "fail", "none"):
        for rank, (found, message) in enumerate(each):
            if found == kind:
                return "fail", f"rank {rank}: {kind}: {message}"
    kind = "pass" if kinds == {"pass"} else "skip"
    return kind, next((message for found, message in each if found == kind), "")


def main():
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["mpidist", "gloo"])
    parser.add_argument("ranks", type=int)
    parser.add_argument("pattern", nargs="?", default=".")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--limit", type=int, default=75, help="seconds of one test")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tests = [name for name in names(folder) if re.search(given.pattern, name)]
        print(f"{len(tests)} tests", flush=True)
        found = results(
            given.backend,
            given.ranks,
            tests,
            folder,
            given.limit,
            lambda text: print(text, flush=True),
        )
    for name, (kind, message) in found.items():
        if kind == "fail":
            print(f"FAIL {name} {message[:300]!r}")
    counts = collections.Counter(kind for kind, _ in found.values())
    print(f"{given.backend} on {given.ranks} ranks: {dict(counts)}")
    unexplained = set(failed(found)) - {name for names in explained().values() for name in names}
    if given.check and unexplained:
        print(f"failed without a reason in {FAILURES.name}: {', '.join(sorted(unexplained))}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if given.check and unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
