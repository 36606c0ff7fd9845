"""Kill ranks of an elastic training: ``elastic_chaos.py WRAPPER LOSSES [SEED]``, at random moments.

``elastic_chaos.py WRAPPER lines [STRIDE [FIRST]]`` kills them at each line of mpidist, or each
STRIDE-th from the FIRST on, that they run in a step: before each word of a board, each call of MPI,
each write to a vault.  ``lines 6`` has each line once; so have together, in less time each,
``lines 36 1``, ``lines 36 7``, ... ``lines 36 31``.  ``source`` in place of ``lines`` has each line
of the source but once, however often a step runs it; those of a wait, too.

The losses of a job come one after another, each some time after training has gone on, and each
has a spare to take the place.  The weights at the end must be, bit for bit, those without a loss,
and no rank may do more than one step again.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
import zlib
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support import processes  # noqa: E402
from tests.support.forked import Forked  # noqa: E402

TRAINING = ROOT / "tests" / "support" / "elastic_trainings.py"
SECONDS = 300.0  # of a job
# PyTorch's DistributedDataParallel has other buckets in its first step: a sum of three terms in
# another place of a bucket may be rounded otherwise, one of two may not.
RANKS = {"torch": 2}
AT_LINES = 6  # losses of a job: of the first ranks, and of spares that have taken a place
# Not every step has as many lines: DDP tries one way after another, and a rank may have to wait.
TRIES = 3
OF_NUMPY = {"numpy", "rows", "nn", "pipeline", "same", "faulty"}
OF_NUMPY |= {"topk", "powersgd", "compress", "pipeline-topk"}
STEPS = {"numpy": 4000, "rows": 4000, "nn": 2000}


class Watched:
    """What the ranks of a job have said so far, in their files."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def lines(self) -> list[str]:
        texts = (path.read_text() for path in self.folder.iterdir() if path.name.isdigit())
        return [line for text in texts for line in text.splitlines()]

    def kill(self, rank: int) -> None:
        """Kill a rank as it was last begun; ProcessLookupError if that has ended."""
        words = [line.split()[1:] for line in self.lines() if line.startswith("pid")]
        pid, start = next((pid, start) for r, pid, start in reversed(words) if int(r) == rank)
        handle = os.pidfd_open(int(pid))
        try:
            # Another process may have got the number meanwhile: one of another test.
            if processes.begun(int(pid)) != start:
                raise ProcessLookupError
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)

    def step(self) -> int:
        return max(
            (int(line.split()[1]) for line in self.lines() if line.startswith("step")), default=0
        )

    def training(self) -> list[int]:
        """Return the ranks that have made a step."""
        files = (path for path in self.folder.iterdir() if path.name.isdigit())
        return [int(path.name) for path in files if "\nstep " in path.read_text()]

    def done(self) -> list[str]:
        return [line for line in self.lines() if line.startswith("done")]

    def again(self) -> int:
        """Return the most steps that a rank has done again after a loss."""
        files = [path.read_text() for path in self.folder.iterdir() if path.name.isdigit()]
        steps = [[int(n) for n in re.findall(r"^step (\d+)$", text, re.M)] for text in files]
        return max((a - b + 1 for each in steps for a, b in pairwise(each)), default=0)


def train(
    wrapper: str,
    steps: int,
    ranks: int,
    spares: int,
    kills=(),
    restarts: int = 0,
    survive: bool = True,
    python: str = sys.executable,
    program: str = "",
    **env: str,
):
    """Run a job; ``kills`` yields seconds to wait before each loss.  Return what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        watched, ended = Watched(folder), threading.Event()
        command = [python, "-m", "mpidist", "run", "-q", "-n", str(ranks)]
        command += ["--spares", str(spares)] if spares else ["--survive"] * survive
        command += ["--max-restarts", str(restarts)] if restarts else []
        command += [*[program] * bool(program), str(TRAINING), wrapper, str(steps)]
        environ = processes.environment(ELASTIC_TEST=folder, PYTHONPATH=str(ROOT), **env)
        killed: list[int] = []

        def kill() -> None:
            for seconds in kills:
                before = watched.step()
                while watched.step() <= before and not ended.wait(0.005):
                    pass
                if ended.wait(seconds):
                    return
                gone = () if restarts else killed
                while True:  # the state is gone with the last rank that has it
                    alive = [rank for rank in watched.training() if rank not in gone]
                    if len(alive) > 1 or restarts or ended.wait(0.005):
                        break
                if ended.is_set() or watched.done():
                    return
                victim = random.choice(alive)
                killed.append(victim)
                while not watched.done():
                    try:
                        watched.kill(victim)
                        break
                    except ProcessLookupError:  # of the last start: it comes again
                        ended.wait(0.005)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        finished = processes.run(command, SECONDS, environ, cwd=folder)
        ended.set()
        killer.join()
        assert restarts or watched.again() <= 1, (watched.lines(), finished.output)
        return finished, killed, watched.done()


def seconds_of(output: str) -> list[float]:
    """Return how long each recovery took, of the lines that say so."""
    found = re.findall(r"ranks after ([\d.,]+) (µs|ms|s)\b", output)
    return [float(n.replace(",", "")) * {"µs": 1e-6, "ms": 1e-3, "s": 1}[unit] for n, unit in found]


def back_after(took: list[float]) -> str:
    median, most = statistics.median(took or [0.0]), max(took, default=0.0)
    return f"back after {median:.3f} s (median), {most:.3f} s at most"


def undisturbed(
    wrapper: str,
    steps: int,
    ranks: int,
    spares: int = 0,
    python: str = sys.executable,
    program: str = "",
    **env: str,
) -> tuple[str, str]:
    """Return what each rank says at the end without a loss, and the output of the job.

    Without spares nothing would survive one: a spare takes as long as a rank to come.
    """
    how = {"survive": False, "python": python, "program": program}
    finished, _, done = train(wrapper, steps, ranks, spares, **how, **env)
    assert finished.status == 0 and len(done) == ranks and len(set(done)) == 1, finished.output
    return done[0], finished.output


def forked(wrapper: str) -> Forked:
    """Return what has imported for many jobs what their ranks import."""
    modules = ("mpidist.nn",) if wrapper in OF_NUMPY else ("mpidist.torch", "torch.utils.data")
    return Forked(*modules, compiler=wrapper == "torch", env=processes.environment())


def at_each_line(wrapper: str, stride: int, first: int = 1, source: bool = False) -> int:
    """Have six losses a job, each at another line of a step; return how many jobs were bad."""
    ranks, steps = RANKS.get(wrapper, 3), 10 * (AT_LINES + 2)
    jobs, bad, begun, took, lines = 0, 0, time.monotonic(), [], set()
    with tempfile.TemporaryDirectory() as folder, forked(wrapper) as program:
        how = {"program": program, "KILL": "9:@:1" if source else "9:line:1", "LINES": folder}
        expected, output = undisturbed(wrapper, steps, ranks, 1, **how)
        if source:
            seen = [line for p in Path(folder).iterdir() for line in p.read_text().splitlines()]
            points = sorted({f"{line.split()[0]}:1" for line in seen})
            # Which lines of a wait are seen is not always the same: a line stays in its piece.
            piece = (stride // AT_LINES, first // AT_LINES)
            todo = [point for point in points if zlib.crc32(point.encode()) % piece[0] == piece[1]]
        else:  # a rank that waits runs the same lines again and again
            most = min(int(count) for count in re.findall(r"^lines (\d+)$", output, re.MULTILINE))
            points = [f"line:{number}" for number in range(1, most + 1)]
            pieces = [points[k : k + AT_LINES] for k in range(first - 1, len(points), stride)]
            todo = [point for piece in pieces for point in piece]
        for _ in range(TRIES):
            left, todo = todo, []
            for k in range(0, len(left), AT_LINES):
                at = dict(enumerate(left[k : k + AT_LINES]))
                kills = " ".join(f"{r}:{point}" for r, point in at.items())
                finished, _, done = train(
                    wrapper, steps, ranks, len(at), program=program, KILL=kills
                )
                good = finished.status == 0 and set(done) == {expected}
                jobs, bad = jobs + 1, bad + (not good)
                took += seconds_of(finished.output)
                lost = dict(re.findall(r"rank (\d+) lost at (\S+?@\d+)", finished.output))
                lines |= set(lost.values())
                todo += [point for r, point in at.items() if str(r) not in lost]
                what = " ".join(f"{at[int(r)]}={line}" for r, line in lost.items())
                print(f"{wrapper}: lost at {what}: {'good' if good else 'BAD'}", flush=True)
                if not good:
                    print(kills, finished.output, expected, done, flush=True)
    minutes = (time.monotonic() - begun) / 60
    print(
        f"{wrapper}: {len(points)} lines a step; {len(took)} losses in {jobs} jobs, before "
        f"{len(lines)} of the source, {len(todo)} not reached: {jobs - bad} good, {bad} bad, in "
        f"{minutes:.1f} min; {back_after(took)}"
    )
    if todo:
        print("not reached:", *todo)
    return bad


def chaos(wrapper: str, losses: int, seed: int, expected: str = "") -> None:
    """Have as many losses, in jobs of up to eight, and print a line for each job."""
    ranks, steps = RANKS.get(wrapper, 3), STEPS.get(wrapper, 800)
    random.seed(seed)
    survived, jobs, begun, took = 0, 0, time.monotonic(), []
    with forked(wrapper) as program:
        expected = expected or undisturbed(wrapper, steps, ranks, program=program)[0]
        while survived < losses:
            more = min(8, losses - survived)
            waits = [random.random() * 0.2 for _ in range(more)]
            for _ in range(TRIES):  # where nobody was killed in time, it is as if not run
                finished, killed, done = train(wrapper, steps, ranks, more, waits, program=program)
                if killed or finished.status or set(done) != {expected}:
                    break
            jobs, survived = jobs + 1, survived + len(killed)
            took += seconds_of(finished.output)
            good = bool(killed) and finished.status == 0 and set(done) == {expected}
            print(
                f"{wrapper}: job {jobs}, ranks {killed} lost: {'good' if good else 'BAD'}",
                flush=True,
            )
            if not good:
                print(finished.output, expected, done)
                raise SystemExit(1)
    minutes = (time.monotonic() - begun) / 60
    print(
        f"{wrapper}: {survived} losses in {jobs} jobs, all survived, in {minutes:.0f} min;", end=" "
    )
    print(back_after(took))


if __name__ == "__main__":
    name, how, *rest = sys.argv[1:]
    if how in ("lines", "source"):
        at_each_line(name, *map(int, rest or ["1"]), source=how == "source")
    else:
        chaos(name, int(how), int(rest[0]) if rest else 0)
