"""Running launches one after another, each with a time limit, and keeping what they gave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.plan import Launch
from mpidist.bench.results import Results
from mpidist.launcher.processes import run_limited

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_LIMIT = 400.0  # seconds after which a launch has failed


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def commit() -> str:
    """Name the state of the sources."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def run_missing(launches: Sequence[Launch], folder: Path, minutes: float) -> None:
    """Run what is not there yet, until the time is over."""
    missing = [one for one in launches if not (folder / f"{one.name}.json").exists()]
    guess = sum(one.expected_seconds() for one in missing) / 60
    say(
        f"{len(launches)} launches, {len(launches) - len(missing)} are there; about {guess:.0f} "
        f"minutes for the others, at most {minutes:g}"
    )
    end, source = time.monotonic() + 60 * minutes, commit()
    for k, launch in enumerate(missing):
        left = end - time.monotonic()
        if left < min(launch.expected_seconds(), 30.0):
            say(f"the time is over: {len(missing) - k} launches are left for the next time")
            return
        begun = time.monotonic()
        ended = run_one(launch, folder, source, min(LAUNCH_LIMIT, left + 30.0))
        seconds = time.monotonic() - begun
        say(f"{k + 1:3}/{len(missing)} {launch.name}: {ended}, {seconds:.0f} s")


def run_one(launch: Launch, folder: Path, source: str, limit: float) -> str:
    """Run one launch and keep its results, or its output where it failed; say how it ended."""
    kept, failed = folder / f"{launch.name}.json", folder / f"{launch.name}.failed"
    part = folder / f"{launch.name}.part"
    part.unlink(missing_ok=True)
    words = ["run", "-n", str(launch.ranks), "--", "mpidist", *launch.bench()]
    command = [launch.python, "-m", "mpidist", *words, "--json", str(part)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, **launch.variant.settings, "PYTHONPATH": path}
    done = run_limited(command, limit, environ, cwd=ROOT)  # `python -m` looks in cwd first
    ended = f"not finished within {limit:.0f} s" if done.timed_out else f"exit code {done.status}"
    settings = "".join(f"{k}={v} " for k, v in launch.variant.settings.items())
    line = f"{settings}mpidist {' '.join(words)}"
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
