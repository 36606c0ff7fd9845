"""A check: the runs of a script, and the report of what differs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InvalidArgument, MpidistError, Unsupported
from ..measure import counted
from .compare import Row, Runs, nondeterministic, rows
from .diagnose import likely
from .log import Log, read_logs
from .plan import Plan, StageForm, Stages

REFERENCES = "from mpidist.oracle.program import references; references()"
CODE = "from mpidist.oracle.program import main; main()"
DEADLINE = "60"  # seconds of a collective, where the user has set none
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
KEPT = 60  # lines of a failed script's output


class ScriptFailed(InvalidArgument):
    """A script that fails as one process; `output` is what it printed, with the traceback."""

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output


@dataclass
class Report:
    """The result of a check: verdicts in order, and the likely cause of the first difference."""

    rows: list[Row]
    cause: str = ""
    notes: list[str] = field(default_factory=list)
    failure: str = ""  # what the ranks' run printed when it failed

    @property
    def first(self) -> Row | None:
        """The first row with a difference."""
        return next((row for row in self.rows if row.differences), None)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, and the ranks came to the end."""
        return self.first is None and not self.failure


def check(
    script: str,
    arguments: Sequence[str] = (),
    ranks: int = 2,
    steps: int = 3,
    *,
    timeout: float = 600.0,
    folder: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Report:
    """Compare a training script, with its `arguments`, on N ranks with itself as one process.

    `steps` is the number of steps of an optimizer to compare, and `timeout` the seconds after which
    a run of the script is ended.  The logs are kept in a temporary folder in `folder`: on several
    nodes it must be one that they share.  ``say(text)`` is called before each run.

    ScriptFailed is raised if the script fails as one process; InvalidArgument if it makes no step,
    or does not compute the same twice; Unsupported if it does what a check cannot compare.
    """
    if not os.path.isfile(script):
        raise InvalidArgument(f"{script}: no such script in {os.getcwd()}")
    with tempfile.TemporaryDirectory(prefix="mpidist-check-", dir=folder) as name:
        runner = _Runner(Path(name), script, list(arguments), timeout)
        say(f"{script} on {counted(ranks, 'rank')}")
        found, failure = runner.run(Plan("ranks", ranks, steps))
        facts: dict[str, object] = {}
        for log in found.values():
            facts.update(log.facts)
        _check_supported(script, found)
        stages = _stages(found)
        # Beside microbatches, which one process has all, single samples are those of an evaluation.
        copies = bool(facts.get("items")) and not facts.get("dealt")
        if stages is not None and copies:
            if stages.replicas > 1:
                raise Unsupported(
                    f"{script}: md.shard of single samples, and a pipeline with replicas: expected "
                    "md.shard of a DataLoader over the replicas"
                )
            copies = False  # the batches are those of the script
        if copies and facts.get("wrapper") == "DistributedDataParallel":
            raise Unsupported(
                f"{script}: md.shard of single samples, and a DistributedDataParallel: expected "
                "md.shard of a DataLoader, or an mpidist.DDP"
            )
        made = any(step.stepped for log in found.values() for step in log.steps)
        if not made and not failure:
            raise InvalidArgument(
                f"{script}: ended without a step of an optimizer of PyTorch or mpidist.nn on a "
                "model in training mode: expected a training script"
            )
        called = any(step.ids for log in found.values() for step in log.steps)
        if made and not called:
            raise InvalidArgument(
                f"{script}: no call of a model was seen before its optimizer's step: expected "
                "model(x), not model.forward(x), with samples in the first dimension of x"
            )
        owners = {} if copies else _owners(found)
        start, torch = str(Path(name, "ranks")), bool(facts.get("torch"))
        plans = {
            role: Plan(role, ranks, steps, copies, owners, start, torch, stages)
            for role in ("reference", "again", "perturbed")
        }
        what = counted(ranks if copies else 1, "process", "es")
        what += " that take themselves for the only one" if copies and ranks > 1 else ""
        say(f"{script} as {what}, twice, and perturbed by an ulp")
        logs = runner.run_references(list(plans.values()))
        runs = Runs(found, logs["reference"], logs["again"], logs["perturbed"], copies)
        known = {name for log in found.values() for name in log.facts}
        if "done" in known and "failed" not in known:
            failure = ""  # those done ended the job: what the others wait for does not come
        return _report(runs, script, failure)


def _report(runs: Runs, script: str, failure: str) -> Report:
    unstable = nondeterministic(runs)
    if unstable is not None:
        row, name = unstable
        raise InvalidArgument(
            f"{script}: two runs as one process differ in step {row.step}, {row.phase}: {name}: "
            "expected a deterministic script: seed its generators, also those of workers, and see "
            "torch.use_deterministic_algorithms"
        )
    found = list(rows(runs))
    report = Report(found, failure=failure)
    if runs.copies:
        report.notes.append(
            "md.shard gives single samples to the script: the reference has a process for each "
            "rank's batches, and averages their gradients; batch statistics and losses that are "
            "sums over a batch are not seen"
        )
    if any("joined" in log.facts for log in runs.reference.values()):
        report.notes.append(
            "as one process, the script makes rank 0's stages: the reference has copies of the "
            "other ranks', too, whose parameters it gives to rank 0's optimizer"
        )
    if report.first is not None:
        report.cause = likely(runs, report.first)
    return report


def _check_supported(script: str, logs: Mapping[int, Log]) -> None:
    for log in logs.values():
        if "unsupported" in log.facts:
            raise Unsupported(
                f"{script}: mpidist check does not compare {log.facts['unsupported']}"
            )


def _stages(logs: Mapping[int, Log]) -> Stages | None:
    """Return the pipeline of the ranks; None if they have none."""
    forms: dict[int, StageForm] = {}
    last = None
    for log in logs.values():
        if "forms" in log.facts:
            last, forms = log, {**log.facts["forms"], **forms}
    if last is None:
        return None
    facts = last.facts
    return Stages(facts["microbatches"], facts["replicas"], facts["first"], forms)


def _owners(logs: Mapping[int, Log]) -> dict[int, dict[int, list[int]]]:
    """Return the ranks that have each sample of each step."""
    found: dict[int, dict[int, list[int]]] = {}
    for rank, log in logs.items():
        for step in log.steps:
            owners = found.setdefault(step.number, {})
            for sample in step.samples.tolist():
                owners.setdefault(sample, []).append(rank)
    return found


class _Runner:
    """Runs the script with taps, by ``mpidist run``."""

    def __init__(self, folder: Path, script: str, arguments: list[str], timeout: float):
        self._folder, self._script, self._timeout = folder, script, timeout
        self._arguments = arguments

    def run(self, plan: Plan) -> tuple[dict[int, Log], str]:
        """Run the script on the ranks; return the logs, and the output if it failed."""
        folder = self._prepare(plan)
        command = ["-m", "mpidist", "run", "-q", "-n", str(plan.ranks), "--", "-c", CODE]
        late = self._wait([*command, str(folder)], folder / "output")
        return self._read(plan, late)

    def run_references(self, plans: Sequence[Plan]) -> dict[str, dict[int, Log]]:
        """Run the script in the roles of a single process, all at a time."""
        for plan in plans:
            self._prepare(plan)
        late = self._wait(["-c", REFERENCES, str(self._folder)], self._folder / "output")
        found = {}
        for plan in plans:
            found[plan.role], failure = self._read(plan, late)
            _check_supported(self._script, found[plan.role])
            if failure:
                raise ScriptFailed(
                    f"{self._script}: fails as one process, too: expected a script that runs on "
                    "any number of ranks",
                    failure,
                )
        return found

    def _prepare(self, plan: Plan) -> Path:
        folder = self._folder / plan.role
        folder.mkdir()
        (folder / "output").touch()
        plan.save(folder)
        return folder

    def _wait(self, words: Sequence[str], output: Path) -> bool:
        """Run a command of Python until it ends; return whether it took too long."""
        command = [sys.executable, *words, self._script, *self._arguments]
        environ = {"MPIDIST_TIMEOUT": DEADLINE, **os.environ, "PYTHONHASHSEED": "0"}
        with open(output, "ab") as file:
            # A session of its own, to end what it has started, too.
            job = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environ,
                start_new_session=True,
            )
            try:
                job.wait(self._timeout)
            except subprocess.TimeoutExpired:
                return True
            finally:
                if job.poll() is None:
                    job.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        job.wait(GRACE)
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        return False

    def _read(self, plan: Plan, late: bool) -> tuple[dict[int, Log], str]:
        """Return the logs of a run, and what it printed if it failed."""
        folder = self._folder / plan.role
        logs = read_logs(folder)
        ended = all("done" in log.facts or "ended" in log.facts for log in logs.values())
        if len(logs) == plan.processes and ended and not late:
            return logs, ""
        text = (folder / "output").read_text(errors="replace")
        lines = text.strip().splitlines()[-KEPT:]
        if late:
            lines.append(f"ended after {self._timeout:g} s")
        if len(logs) < plan.processes:
            above = self._folder / "output"
            lines += above.read_text(errors="replace").splitlines() if above.exists() else []
            told = "\n".join(lines)
            raise MpidistError(f"{self._script}: {plan.role}: processes did not start:\n{told}")
        return logs, "\n".join(lines) or "it ended without a word"
