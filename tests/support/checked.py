"""A run of mpidist check, as a user starts it, on a training of tests/oracle."""

import re
import sys
from pathlib import Path

from tests.support.processes import run

HERE = Path(__file__).parents[1] / "oracle"
ROW = re.compile(r"step (\d+) +(\w+) +(equal|DIFFERS) +(.*)")


class Checked:
    """What a check printed."""

    def __init__(self, *words, ranks=2, steps=2, python=sys.executable):
        script = HERE / f"{words[0]}_training.py"
        command = [python, "-m", "mpidist", "check", "-n", str(ranks), "--steps", str(steps)]
        finished = run([*command, str(script), "--", *words[1:]], 200)
        assert not finished.timed_out, finished.output
        self.status, self.output = finished.status, finished.output
        found = [match.groups() for line in self.output.splitlines() if (match := ROW.match(line))]
        self.rows = [(int(step), phase, verdict) for step, phase, verdict, _ in found]
        self.first = next((row for row in found if row[2] == "DIFFERS"), None)
        likely = [line for line in self.output.splitlines() if line.startswith("        likely")]
        self.cause = likely[0].split(None, 1)[1] if likely else ""

    def assert_equal(self, steps=2):
        assert self.status == 0, self.output
        assert self.first is None, self.output
        assert {step for step, *_ in self.rows} == set(range(1, steps + 1)), self.output

    def assert_differs(self, phase, name, which, *causes):
        assert self.status == 1, self.output
        assert self.first is not None, self.output
        assert self.first[1] == phase, self.output
        assert name in self.first[3] and which in self.first[3], self.output
        for cause in causes:
            assert cause in self.cause, self.output
